-- Set how long deliveries of a stream have been idle and, if wanted, how often they count as delivered: of those only that
-- are pending at this consumer (or at one that is gone). What somebody else has taken over meanwhile, or what was
-- acknowledged, stays as it is; between
-- two commands of our own it could be taken back.
--
-- KEYS[1]  stream   the stream that consumers read
-- KEYS[2]  hash     the relay's marker beside it, not used
-- ARGV[1]  the group
-- ARGV[2]  the consumer
-- ARGV[3]  the consumer that has them: the same, or one that is gone and whose heir it is
-- ARGV[4]  milliseconds for which the deliveries are to have been idle
-- ARGV[5…] ids, each followed by its count; '' leaves it
--
-- Returns the ids that are the consumer's. One whose entry was deleted is so for the last time: XCLAIM forgets it.

local ours, ids = {}, {}
for i = 5, #ARGV, 2 do
  local id, count = ARGV[i], ARGV[i + 1]
  if #redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1, ARGV[3]) > 0 then
    ours[#ours + 1] = id
    ids[count] = ids[count] or {}
    table.insert(ids[count], id)
  end
end
for count, those in pairs(ids) do
  local options = {'IDLE', ARGV[4], 'JUSTID'}  -- JUSTID leaves the count alone, and RETRYCOUNT sets it
  if count ~= '' then options = {'IDLE', ARGV[4], 'RETRYCOUNT', count, 'JUSTID'} end
  for first = 1, #those, 1000 do  -- as many as Lua can unpack at once, and some more
    local command = {unpack(those, first, math.min(first + 999, #those))}
    for _, option in ipairs(options) do command[#command + 1] = option end
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, unpack(command))
  end
end
return ours
