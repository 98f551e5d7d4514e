-- Look at one stream and how far its groups are; trim what all of them have acknowledged, if asked.
--
-- KEYS     see marker.lua, which stands before this
-- ARGV[1]  '' to look only; or milliseconds: trim what is older than that (0: whatever its age) and acknowledged by every
--          group
-- ARGV[2…] groups without which nothing is trimmed: declared, but perhaps lost by the server
--
-- Returns {length, missing, trimmed, marker, groups}: `missing` entries were taken by strangers since the last restart of
-- the marker, `trimmed` by this call; a group is {name, pending, id of the oldest pending entry ('' for none), the batch it
-- still needs, the batch of its first undelivered entry, undelivered entries of that batch, milliseconds since one of its
-- consumers asked for something (-1: it has none)}. A batch is as the entry at its end says, '' where nothing is left, and
-- '?' where the entry stands before the marker's restart, so that its number may be of another count.
--
-- Nothing is written at ARGV[1] = ''. XTRIM and HDEL work at full memory; where HINCRBY is refused `absent` is forgotten,
-- and one entry is said to be missing until the next restart of the marker: rather published twice than never.

local marker, there, since, absent = look()
if not there then return {0, 0, 0, '', {}} end

local function batch_from(start)  -- the batch that the first entry from `start` on belongs to, and entries up to its end
  local count = 0
  while true do
    local entries = call('XRANGE', KEYS[1], start, '+', 'COUNT', 100)
    if count == 0 and #entries > 0 and (not since or earlier(entries[1][1], since)) then return '?', 0 end
    for i = 1, #entries do
      local fields = entries[i][2]
      count = count + 1
      if fields[#fields - 1] == 'batch' and string.find(fields[#fields], '^%d+:[%w-]+$') then return fields[#fields], count end
    end
    if #entries < 100 then return '', count end
    start = '(' .. entries[#entries][1]
  end
end

local function after(id)  -- the id that follows; with numbers too long for Lua the same one, so that its entry stays
  local time, number = string.match(id, '^(%d+)-(%d+)$')
  return #number > 15 and id or time .. '-' .. string.format('%d', number + 1)
end

local groups, names, limit = {}, {}, false
if ARGV[1] ~= '' then
  local now = call('TIME')
  local time = now[1] * 1000 + math.floor(now[2] / 1000)
  limit = string.format('%d-0', math.max(time - ARGV[1], 0))
  -- Ids in the future (a clock that was set back) tell no age, and would stay for longer than ledgers remember them.
  local future = earlier(string.format('%d-0', time + 60000), there['last-generated-id'])
  if ARGV[1] == '0' or future then limit = '18446744073709551615-0' end
end
for _, info in ipairs(call('XINFO', 'GROUPS', KEYS[1])) do
  local group = named(info)
  local delivered, oldest = group['last-delivered-id'], ''
  local undelivered, in_it = batch_from('(' .. delivered)
  local needed, keep = undelivered, after(delivered)
  if group['pending'] > 0 then
    oldest = call('XPENDING', KEYS[1], group['name'])[2]
    if not earlier(keep, oldest) then needed, keep = batch_from(oldest), oldest end  -- it is, where XGROUP SETID set it back
  end
  if limit and earlier(keep, limit) then limit = keep end
  names[group['name']] = true
  local idle = -1
  for _, consumer in ipairs(call('XINFO', 'CONSUMERS', KEYS[1], group['name'])) do
    local since = named(consumer)['idle']
    if idle < 0 or since < idle then idle = since end
  end
  groups[#groups + 1] = {group['name'], group['pending'], oldest, needed, undelivered, in_it, idle}
end
for i = 2, #ARGV do
  if not names[ARGV[i]] then limit = false end
end

local trimmed = 0
if limit and #groups > 0 then
  -- Exactly: else the last hundred entries of an idle stream would stay for longer than ledgers remember them.
  trimmed = call('XTRIM', KEYS[1], 'MINID', '=', limit)
  if trimmed > 0 and absent and type(redis.pcall('HINCRBY', KEYS[2], 'absent', trimmed)) == 'table' then
    call('HDEL', KEYS[2], 'absent')
    absent = nil
  end
end
local stream = named(call('XINFO', 'STREAM', KEYS[1]))
local missing = since and 1 or 0
if absent then missing = stream['entries-added'] - stream['length'] - absent - trimmed end
return {stream['length'], math.max(missing, 0), trimmed, marker, groups}
