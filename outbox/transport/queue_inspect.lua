-- Look at a queue; nothing is written.
--
-- KEYS     see queue.lua, which stands before this
-- ARGV[1]  'state', 'after', 'job' or 'jobs'
--
-- 'state' (ARGV[2] 'ended' to look at those, too: at thousands) returns {outstanding, missing, marker, group ('' none), running, id of what has run for longest ('' none), lowest batch
--   that is outstanding ('' none), ready and delayed, milliseconds since it was asked for jobs (-1: never), high, normal, low,
--   delayed, running without a valid claim, when the oldest ready job became so ('' none), when the next delayed one is due
--   ('' none), how many of each status are in :completed and :failed, the time}
-- 'after'  ARGV[2] a batch's number, ARGV[3] how many at most: ids outstanding that later batches brought, the newest first
-- 'job'    ARGV[2] an id: {id, deadline ('' none), flat list of names and values}, nothing where the queue does not know it
-- 'jobs'   ARGV[2] a status, ARGV[3] how many at most, ARGV[4] how many to skip: a list of such

local n, time = sizes(), clock()

local function shown(id) return {id, call('ZSCORE', claims, id) or '', call('HGETALL', job .. id)} end

if ARGV[1] == 'after' then
  return call('ZREVRANGEBYSCORE', batches, '9007199254740992', '(' .. ARGV[2], 'LIMIT', 0, ARGV[3])
elseif ARGV[1] == 'job' then
  return state(ARGV[2], ':status')[1] and shown(ARGV[2]) or {}
elseif ARGV[1] == 'jobs' then
  local status, most, skip, ids, found = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), {}, {}
  if status == 'ready' then
    for _, list in ipairs({high, normal, low}) do
      local length = call('LLEN', list)
      local page = call('LRANGE', list, skip, skip + most - #ids - 1)
      if #ids < most then for _, id in ipairs(page) do ids[#ids + 1] = id end end
      skip = math.max(0, skip - length)
    end
  elseif status == 'delayed' then
    ids = call('ZRANGE', delayed, skip, skip + most - 1)
  else
    local all = status == 'running' and call('HKEYS', processing) or call('ZREVRANGE', status == 'completed' and completed or failed, 0, -1)
    if status == 'running' then table.sort(all) end
    for _, id in ipairs(all) do
      if state(id, ':status')[1] == status then
        if skip > 0 then skip = skip - 1 elseif #ids < most then ids[#ids + 1] = id end
      end
    end
  end
  for _, id in ipairs(ids) do if state(id, ':status')[1] then found[#found + 1] = shown(id) end end
  return found
end

local marker, outstanding = look(n)
local missing = outstanding and math.max(math.abs(outstanding - n.all), math.abs(outstanding - n.batches)) or 0
local others = call('HMGET', relay, 'group', 'asked')
local lowest = call('ZRANGE', batches, 0, 0, 'WITHSCORES')[2] or ''
local oldest
for _, list in ipairs({high, normal, low}) do
  for _, at in ipairs({0, -1}) do
    local id = call('LINDEX', list, at)
    local since = id and tonumber(state(id, ':since')[1])
    if since then oldest = math.min(oldest or since, since) end
  end
end
local expired = call('ZCOUNT', claims, '-inf', exact(time))
local counts = {}
for _, key in ipairs(ARGV[2] == 'ended' and {completed, failed} or {}) do
  for _, id in ipairs(call('ZRANGE', key, 0, -1)) do
    local status = state(id, ':status')[1] or 'failed'
    counts[status] = (counts[status] or 0) + 1
  end
end
local flat = {}
for status, count in pairs(counts) do flat[#flat + 1], flat[#flat + 2] = status, count end
return {
  outstanding or n.all, missing, marker, others[1] or '', n.processing, call('ZRANGE', claims, 0, 0)[1] or '',
  lowest == 'inf' and '' or lowest, n.ready + n.delayed,
  others[2] and whole(math.max(0, time - (tonumber(others[2]) or 0))) or '-1', n.high, n.normal, n.low, n.delayed,
  expired + math.max(0, n.processing - n.claims), oldest and whole(oldest) or '',
  call('ZRANGE', delayed, 0, 0, 'WITHSCORES')[2] or '', flat, exact(time),
}
