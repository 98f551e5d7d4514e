-- Publish one batch to one queue, if the queue is where the batch expects it, as publish.lua does for streams: a compare-and-set.
-- Also a look at the marker, a change of the marker alone, and jobs that come from no outbox.
--
-- KEYS     see queue.lua, which stands before this
-- ARGV     as those of publish.lua, but ARGV[6] may be 'enqueue', too: jobs of no batch, wherever the marker is, and only those
--          whose ids the queue does not know
--
-- Returns the marker that is there afterwards, '' for none. For 'enqueue': for each job whether it was added, 1 or 0.
--
-- A job that is outstanding already is not added again. One that has left is: the relay publishes again only what PostgreSQL does
-- not know to be done, and the ledger recognises what is.
--
-- Nothing is written before everything has been read and compared, and the first write is one that is refused where memory is
-- full, so that a batch is added whole or not at all.

local n = sizes()
local marker, outstanding = look(n)
local mode = ARGV[6]
if mode ~= 'enqueue' and (ARGV[2] == '' or marker ~= ARGV[1] or (marker == ARGV[2] and mode == '')) then return marker end

local function due(text)  -- RFC 3339 as milliseconds, rounded up; 0 where it is not: consumers say that it is malformed
  local year, month, day, hour, minute, second, rest =
    string.match(text, '^(%d%d%d%d)-(%d%d)-(%d%d)[Tt ](%d%d):(%d%d):(%d%d)(.*)$')
  if not year then return 0 end
  local fraction, zone = string.match(rest, '^%.?(%d*)(.*)$')
  local sign, hours, minutes = string.match(zone, '^([+-])(%d%d):?(%d?%d?)$')
  if not sign and zone ~= 'Z' and zone ~= 'z' then return 0 end
  hours, minutes = tonumber(hours) or 0, tonumber(minutes) or 0
  local offset = (hours * 60 + minutes) * (sign == '-' and -1 or 1)
  year, month, day = tonumber(year), tonumber(month), tonumber(day)
  local longest = month == 2 and 29 or (month == 4 or month == 6 or month == 9 or month == 11) and 30 or 31
  if month < 1 or month > 12 or day < 1 or day > longest or hour + 0 > 23 or minute + 0 > 59 or second + 0 > 60
      or hours > 23 or minutes > 59 then
    return 0
  end
  if month <= 2 then year, month = year - 1, month + 12 end
  local days = 365 * year + math.floor(year / 4) - math.floor(year / 100) + math.floor(year / 400)
    + math.floor((153 * (month - 3) + 2) / 5) + day - 719469
  local part = fraction == '' and 0 or math.ceil(tonumber('0.' .. fraction) * 1000)
  return (((days * 24 + hour) * 60 + minute - offset) * 60 + second) * 1000 + part
end

local time, restart = clock(), mode == 'restart'
local damage = restart and (not outstanding or outstanding ~= n.all or n.batches ~= n.all)
local distrust = damage or (not restart and call('HEXISTS', relay, 'damaged') == 1)
  or (mode == 'enqueue' and outstanding ~= n.all)
local listed
local function in_list(id)
  if not listed then
    listed = {}
    for _, list in ipairs({high, normal, low}) do
      for _, each in ipairs(call('LRANGE', list, 0, -1)) do listed[each] = true end
    end
  end
  return listed[id]
end

local function is_there(id, status)  -- whether a job that says so of itself really is outstanding; for 'enqueue', or has left
  if status == 'ready' then return not distrust or in_list(id) end
  if status == 'delayed' then return call('ZSCORE', delayed, id) end
  if status == 'running' then return call('HEXISTS', processing, id) == 1 or call('ZSCORE', claims, id) end
  return mode == 'enqueue'
end

local runs, seen, known, added = cmsgpack.unpack(ARGV[4]), {}, {}, {}
local before, gone = {}, {}  -- ids that are there, and those that were
for _, run in ipairs(runs) do
  for field, name in ipairs(run[1]) do
    if name == 'id' then
      for _, id in ipairs(run[field + 1]) do
        local status = seen[id] and 'seen' or call('HGET', job .. id, ':status')
        local there = status and (seen[id] or is_there(id, status))
        if status and not there then gone[id] = true end
        seen[id] = true
        known[#known + 1] = there and true or false
        added[#added + 1] = there and 0 or 1
        if there then before[#before + 1] = id end
      end
    end
  end
end

local number = mode ~= 'enqueue' and mode ~= 'append' and string.match(ARGV[2], '^%d+:(%d+):') or '+inf'
if #known > 0 and mode ~= 'enqueue' then call('HSET', relay, 'lanes', ARGV[3], 'keep', ARGV[5]) end
if mode ~= 'enqueue' and #known == 0 then call('HSET', relay, 'batch', ARGV[2]) end
if damage then  -- count anew what is there, and know it as outstanding
  for _, id in ipairs(call('ZRANGE', claims, 0, -1)) do
    local found = state(id, ':status', ':by')
    if found[1] == 'running' then call('HSETNX', processing, id, found[2] or '') end
  end
  call('DEL', batches)
  local ids, once = {}, {}
  local function keep(those)  -- returns those that are there for the first time: one that is there twice would seem to be missing
    local rest = {}
    for _, id in ipairs(those) do
      if not once[id] then
        once[id], rest[#rest + 1] = true, id
        ids[#ids + 1], ids[#ids + 2] = '+inf', id
      end
    end
    return rest
  end
  for _, id in ipairs(call('HKEYS', processing)) do
    if (state(id, ':status')[1] or 'running') == 'running' then
      keep({id})
    else
      call('HDEL', processing, id)
      call('ZREM', claims, id)
    end
  end
  n.ready = 0
  for _, list in ipairs({high, normal, low}) do
    local all = call('LRANGE', list, 0, -1)
    local rest = keep(all)
    if #rest < #all then
      call('DEL', list)
      in_chunks('RPUSH', list, rest)
    end
    n.ready = n.ready + #rest
  end
  for _, id in ipairs(call('ZRANGE', delayed, 0, -1)) do
    if once[id] and state(id, ':status')[1] ~= 'delayed' then
      call('ZREM', delayed, id)
      n.delayed = n.delayed - 1
    else
      keep({id})
    end
  end
  in_chunks('ZADD', batches, ids)
  call('HSET', relay, 'added', whole(n.ready + n.delayed + call('HLEN', processing)), 'ended', '0', 'damaged', '1')
elseif restart then
  call('HDEL', relay, 'damaged')
end
if restart then call('HDEL', relay, 'replayed') end

local lists, new, numbers, earliest = {[high] = {}, [normal] = {}, [low] = {}}, 0, {}, nil
local now = whole(time)
local position = 0
for _, run in ipairs(runs) do
  local names, arguments, columns, id_at, priority_at, due_at, lifo_at = run[1], {}, {}, nil, nil, nil, nil
  for field = 1, #names do
    local name = names[field]
    arguments[2 * field - 1], columns[field] = name, run[field + 1]
    if name == 'id' then id_at = field elseif name == 'priority' then priority_at = field
    elseif name == 'runat' then due_at = field elseif name == 'lifo' then lifo_at = field end
  end
  local own = 2 * #names
  arguments[own + 1], arguments[own + 3], arguments[own + 4] = ':status', ':added', now
  arguments[own + 5], arguments[own + 6] = ':since', now
  for entry = 1, id_at and #columns[1] or 0 do
    position = position + 1
    if not known[position] then
      for field = 1, #names do arguments[2 * field] = columns[field][entry] end
      local id, when = columns[id_at][entry], due_at and due(columns[due_at][entry]) or 0
      local list = list_of(priority_at and columns[priority_at][entry])
      if gone[id] then
        call('DEL', job .. id)
        call('ZREM', completed, id)
        call('ZREM', failed, id)
      end
      local later = when > time
      arguments[own + 2] = later and 'delayed' or 'ready'
      arguments[own + 7], arguments[own + 8] = due_at and ':due' or nil, due_at and whole(when) or nil
      in_chunks('HSET', job .. id, arguments)
      if later then
        call('ZADD', delayed, whole(when), id)
        earliest = math.min(earliest or when, when)
      elseif lifo_at and columns[lifo_at][entry] == '1' then
        call('LPUSH', list, id)
      else
        lists[list][#lists[list] + 1] = id
      end
      new = new + 1
      numbers[#numbers + 1], numbers[#numbers + 2] = number, id
    end
  end
end
for list, ids in pairs(lists) do in_chunks('RPUSH', list, ids) end
if number ~= '+inf' then
  for _, id in ipairs(before) do numbers[#numbers + 1], numbers[#numbers + 2] = number, id end
end
in_chunks('ZADD', batches, numbers)
if new > 0 then
  call('HINCRBY', relay, 'added', new)
  local first = earliest and call('ZRANGE', delayed, 0, 0, 'WITHSCORES')[2]
  if n.ready == 0 and (call('LLEN', high) + call('LLEN', normal) + call('LLEN', low) > 0
      or (first and tonumber(first) >= earliest)) then
    wake(n)
  end
end
if mode == 'enqueue' then return added end
if mode == 'append' then
  local began, steps = string.match(call('HGET', relay, 'replayed') or '', '^(%d+):(%d+)$')
  if not began then began, steps = whole(time * 1000), 0 end
  call('HSET', relay, 'replayed', began .. ':' .. whole(steps + 1))
end
if call('HEXISTS', relay, 'added') == 0 then call('HSET', relay, 'added', '0') end
call('HSET', relay, 'batch', ARGV[2])
return ARGV[2]
