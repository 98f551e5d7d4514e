-- Let jobs leave the queue: acknowledge them, say what became of those that had left, or cancel one. Also where memory is full.
--
-- KEYS     see queue.lua, which stands before this
-- ARGV[1]  'ack': only with the token of their claim; 'settle': only those that are not outstanding; 'cancel'
-- ARGV[2]  how many ids :completed and :failed keep, each
-- ARGV[3…] ids, each followed by token, status, result and error ('' none)
--
-- Returns for 'ack' the ids that others have by now; for 'cancel' what the job was, '' where the queue does not know it.

local n, now = sizes(), whole(clock())
local what, most = ARGV[1], tonumber(ARGV[2])
local left, taken, speak = {}, {}, true
local ends = {[completed] = {}, [failed] = {}}

local function tell(status, id)  -- a convenience: rights on channels may be missing
  if speak then speak = type(redis.pcall('PUBLISH', base .. ':events', status .. ' ' .. id)) == 'number' end
end

local function leave(id, status, result, error, again)  -- again: it had left before
  local there = status == 'completed' and completed or failed
  if again then call('ZREM', there == failed and completed or failed, id) end
  local set, gone = {':status', status, ':since', now}, {'data'}
  for name, value in pairs({[':result'] = result, [':error'] = error}) do
    if value == '' then gone[#gone + 1] = name else set[#set + 1], set[#set + 2] = name, value end
  end
  call('HSET', job .. id, unpack(set))
  call('HDEL', job .. id, unpack(gone))
  ends[there][#ends[there] + 1], ends[there][#ends[there] + 2] = now, id
  tell(status, id)
end

for at = 3, #ARGV, 5 do
  local id, token, status, result, error = unpack(ARGV, at, at + 4)
  local found = state(id, ':status', ':token', 'priority')
  local was = found[1] or ''
  if what == 'ack' then
    if was == 'running' and found[2] == token then
      leave(id, status, result, error, false)
      left[#left + 1] = id
    elseif is_outstanding(was) then
      taken[#taken + 1] = id
    end
  elseif what == 'settle' then
    -- what is said late, by a worker that was at it until it was cancelled, is no news
    local late = status == 'waiting' and (was == 'cancelled' or was == 'completed')
    if was ~= '' and not is_outstanding(was) and not late then leave(id, status, result, error, true) end
  else
    local removed = (was == 'ready' and call('LREM', list_of(found[3]), 1, id)) or (was == 'delayed' and call('ZREM', delayed, id)) or 0
    if removed > 0 or was == 'waiting' then leave(id, 'cancelled', '', '', was == 'waiting') end
    if removed > 0 then left[#left + 1] = id end
    taken = was
  end
end
if #left > 0 then
  in_chunks('HDEL', processing, left)
  in_chunks('ZREM', claims, left)
  in_chunks('ZREM', batches, left)
  call('HINCRBY', relay, 'ended', #left)
end
for key, ids in pairs(ends) do
  in_chunks('ZADD', key, ids)
  if #ids > 0 then trim(key, most) end
end
return taken
