-- Make a queue the queue of a consumer, or free it.
--
-- KEYS     see queue.lua, which stands before this
-- ARGV[1]  'open' or 'drop'
-- ARGV[2]  the group
--
-- Returns whether something has changed, 1 or 0.

sizes()
local group = call('HGET', relay, 'group')
if ARGV[1] == 'drop' then return group == ARGV[2] and call('HDEL', relay, 'group') or 0 end
if group and group ~= ARGV[2] then
  return redis.error_reply('ERR this queue is the queue of consumer ' .. group .. ', and a job is done by one consumer only: '
    .. 'two ledgers would do it twice. If ' .. group .. ' is gone for good, '
    .. '`outbox drop-group ' .. group .. '` frees it')
end
return group and 0 or call('HSET', relay, 'group', ARGV[2])
