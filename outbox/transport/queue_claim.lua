-- Take jobs: those that are ready, those whose claim has ended, or those of a process that is gone. A claim moves the id and writes
-- token, deadline and count in one step, also where memory is full.
--
-- KEYS     see queue.lua, which stands before this
-- ARGV[1]  'ready'    the next jobs, after what is due has become ready
--          'overdue'  what nobody has renewed in time, and what is in :processing without a claim (after it had one in vain)
--          'left'     what a process has; nothing changes
--          'reclaim'  nothing is taken: what is overdue for half a claim more becomes ready again
-- ARGV[2]  milliseconds of a claim
-- ARGV[3]  how many at most
-- ARGV[4]  how many ids :failed keeps
-- ARGV[5]  the group, and
-- ARGV[6]  the process, and
-- ARGV[7]  the token of the new claims
-- ARGV[8]  'overdue': milliseconds for which jobs must not have been renewed, and
-- ARGV[9]  when this look began ('' now): what has been taken since is left out
--
-- Returns {jobs, lost, when}: a job is {id, token, count, flat list of names and values}; `lost` are ids that had no data, and
-- are in :failed now; `when` is for 'ready' milliseconds until the next delayed job is due (-1: there is none), for 'overdue'
-- when this look began ('' where it has come to its end), for 'reclaim' how many are ready again.

local n, time = sizes(), clock()
local what, span, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local kept, group, process, token = tonumber(ARGV[4]), ARGV[5], ARGV[6], ARGV[7]
if what ~= 'reclaim' then
  local wrong = checked_group(group)
  if wrong then return wrong end
end
local now, deadline = whole(time), exact(time + span)
local jobs, lost, running, held = {}, {}, {}, {}

local function take(id, count)
  call('HSET', job .. id, ':status', 'running', ':since', now, ':count', count, ':token', token, ':by', process)
  running[#running + 1], running[#running + 2] = id, process
  held[#held + 1], held[#held + 2] = deadline, id
  jobs[#jobs + 1] = {id, token, count, call('HGETALL', job .. id)}
end

local relayed = call('HEXISTS', relay, 'batch') == 1

local function bury(id)  -- what has no data: it stays outstanding, so that the relay, if there is one, sees that it is missing
  lost[#lost + 1] = id
  if not relayed and call('ZREM', batches, id) == 1 then call('HINCRBY', relay, 'ended', 1) end
  if type(redis.pcall('HSET', job .. id, ':status', 'failed', ':since', now, ':error', 'its data are lost')) == 'number' then
    call('ZADD', failed, now, id)
  end
end

local function forget(id)
  call('HDEL', processing, id)
  call('ZREM', claims, id)
end

local function ready() return n.high + n.normal + n.low end

local function count_ready() n.high, n.normal, n.low = call('LLEN', high), call('LLEN', normal), call('LLEN', low) end

local function promote()  -- what is due becomes ready, in the order in which it is
  local ids = call('ZRANGEBYSCORE', delayed, '-inf', whole(math.floor(time)), 'LIMIT', 0, math.max(most, 500))
  for _, id in ipairs(ids) do
    local found = state(id, ':status', 'priority', 'lifo')
    if found[1] == 'delayed' then call('HSET', job .. id, ':status', 'ready', ':since', now) end
    call(found[3] == '1' and 'LPUSH' or 'RPUSH', list_of(found[2]), id)
  end
  if #ids > 0 then
    in_chunks('ZREM', delayed, ids)
    count_ready()
  end
end

-- Of 16 jobs one comes from the low ones first, and four from the normal ones, where there are such.
local orders = {high = {'high', 'normal', 'low'}, normal = {'normal', 'high', 'low'}, low = {'low', 'normal', 'high'}}
local function next_ids()
  local turn = tonumber(call('HGET', relay, 'turn')) or 0
  local left, from, wanted = {high = n.high, normal = n.normal, low = n.low}, {}, {high = 0, normal = 0, low = 0}
  for at = 1, math.min(most, ready()) do
    local step = (turn + at) % 16
    for _, priority in ipairs(orders[step == 0 and 'low' or step % 4 == 2 and 'normal' or 'high']) do
      if left[priority] > 0 then
        left[priority], wanted[priority] = left[priority] - 1, wanted[priority] + 1
        from[at] = priority
        break
      end
    end
  end
  local popped, at, ids = {}, {high = 0, normal = 0, low = 0}, {}
  for priority, count in pairs(wanted) do
    if count > 0 then popped[priority] = call('LPOP', list_of(priority), count) end
  end
  for _, priority in ipairs(from) do
    at[priority] = at[priority] + 1
    ids[#ids + 1] = popped[priority][at[priority]]
  end
  if #ids > 0 then call('HINCRBY', relay, 'turn', #ids) end
  return ids
end

local when = ''
if what == 'ready' then
  promote()
  local looked_at, wanted = 0, most
  while #jobs < wanted and ready() > 0 and looked_at < wanted + 1000 do
    most = wanted - #jobs
    for _, id in ipairs(next_ids()) do
      looked_at = looked_at + 1
      local found = state(id, ':status', ':count')
      if found[1] == 'ready' then take(id, (tonumber(found[2]) or 0) + 1)
      elseif not found[1] then bury(id) end  -- else somebody else has put it here
    end
    count_ready()
  end
  local due = call('ZRANGE', delayed, 0, 0, 'WITHSCORES')[2]
  when = ready() > 0 and 0 or due and math.max(0, math.ceil(tonumber(due) - time)) or -1
  if time - (tonumber(call('HGET', relay, 'asked')) or 0) > 5000 then call('HSET', relay, 'asked', now) end
elseif what == 'left' then
  local ids, all = {}, call('HGETALL', processing)
  for at = 1, #all, 2 do if all[at + 1] == process then ids[#ids + 1] = all[at] end end
  table.sort(ids)
  for _, id in ipairs(ids) do
    local found = state(id, ':token', ':count', ':status')
    if found[3] == 'running' and #jobs < most then
      jobs[#jobs + 1] = {id, found[1], tonumber(found[2]), call('HGETALL', job .. id)}
    end
  end
else
  if n.processing > n.claims then  -- what has no claim gets one, so that whoever has it can renew it
    local without = 0
    for _, id in ipairs(call('HKEYS', processing)) do
      if without < 128 and not call('ZSCORE', claims, id) then
        call('ZADD', claims, deadline, id)
        without = without + 1
      end
    end
  end
  local began = tonumber(ARGV[9]) or time
  local limit = what == 'reclaim' and exact(time - span / 2) or exact(began - ARGV[8] + span)
  local ids = call('ZRANGEBYSCORE', claims, '-inf', '(' .. limit, 'LIMIT', 0, most)
  local again = {}
  for _, id in ipairs(ids) do
    local found = state(id, ':status', ':count', 'priority')
    local count = tonumber(found[2]) or 0
    if found[1] ~= 'running' then
      forget(id)
      if not found[1] then bury(id) end
    elseif what == 'overdue' then
      take(id, count + 1)
    elseif count > 1 then  -- it may end its process: it is for those who take it over and run it alone
      call('ZADD', claims, exact(time), id)
    else
      forget(id)
      call('HSET', job .. id, ':status', 'ready', ':since', now, ':token', '')
      again[#again + 1] = {list_of(found[3]), id}
    end
  end
  for at = #again, 1, -1 do call('LPUSH', again[at][1], again[at][2]) end
  if #again > 0 then wake(n) end
  when = what == 'reclaim' and #again or #ids == most and exact(began) or ''
end
in_chunks('HSET', processing, running)
in_chunks('ZADD', claims, held)
if #lost > 0 then trim(failed, kept) end
return {jobs, lost, when or ''}
