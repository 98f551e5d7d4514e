-- Remove consumers' names from a group that have nothing pending: with pending entries they would be lost for ever.
--
-- KEYS[1]  stream   the stream that consumers read
-- KEYS[2]  hash     the relay's marker beside it, not used
-- ARGV[1]  the group
-- ARGV[2]  milliseconds for which a name must have been idle
-- ARGV[3…] names for which it need not
--
-- Returns the names removed.

local removed, at_once = {}, {}
for i = 3, #ARGV do at_once[ARGV[i]] = true end
for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local consumer = {}
  for i = 1, #info, 2 do consumer[info[i]] = info[i + 1] end
  if consumer['pending'] == 0 and (at_once[consumer['name']] or consumer['idle'] >= tonumber(ARGV[2])) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], consumer['name'])
    removed[#removed + 1] = consumer['name']
  end
end
return removed
