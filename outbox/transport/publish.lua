-- Publish one batch to one stream, if the stream is where the batch expects it: a compare-and-set. Also, with an empty
-- marker afterwards, a plain look at the marker; and, without entries, a change of the marker alone.
--
-- KEYS     see marker.lua, which stands before this
-- ARGV[1]  the marker expected ('' for none)
-- ARGV[2]  the marker afterwards ('' to look only)
-- ARGV[3]  number of lanes
-- ARGV[4]  msgpack: the list of runs of entries with the same fields; a run is the list of the fields' names, followed
--          by the list of all entries' values for each of them; names and values are strings
-- ARGV[5]  seconds for which the outbox keeps events
-- ARGV[6]  '' the batch follows the expected one; 'restart': it does not, so that batches may be in the stream twice;
--          'append': entries of no batch, the marker stays, and `replayed` counts one more
--
-- Returns the marker that is there afterwards, '' for none. The batch is in the stream if that is ARGV[2].
--
-- Nothing is written before everything has been read and compared; a refusal for lack of memory, a read-only replica
-- and the like comes at the first write, so that a batch is added whole or not at all. A crash in between can at worst
-- leave entries without a marker, which are then published again.

local current, stream = look()
if ARGV[2] == '' or current ~= ARGV[1] or (current == ARGV[2] and ARGV[6] == '') then return current end

if stream and stream['last-generated-id'] == '18446744073709551615-18446744073709551615' then
  return redis.error_reply('ERR somebody has taken the last possible id of this stream, so that nothing can be added to it any '
    .. 'more: delete it (DEL), and the relay publishes again what is not acknowledged')
end
local last, added, length = nil, 0, 0
if stream then last, added, length = stream['last-generated-id'], stream['entries-added'], stream['length'] end
local replayed
if ARGV[6] == 'append' then
  local began, steps = string.match(call('HMGET', KEYS[2], 'replayed')[1] or '', '^(%d+):(%d+)$')
  if not began then
    local now = call('TIME')
    began, steps = string.format('%d%06d', now[1], now[2]), 0
  end
  replayed = began .. ':' .. string.format('%d', steps + 1)
end
local entries, first = 0, nil
for _, run in ipairs(cmsgpack.unpack(ARGV[4])) do
  local names, arguments, columns = run[1], {}, {}
  for field = 1, #names do arguments[2 * field - 1], columns[field] = names[field], run[field + 1] end
  for entry = 1, #columns[1] do
    for field = 1, #names do arguments[2 * field] = columns[field][entry] end
    last = call('XADD', KEYS[1], '*', unpack(arguments))
    first = first or last
  end
  entries = entries + #columns[1]
end
if not last then  -- nothing is left of the batch, and a marker counts only beside a stream: an empty one
  last, added = call('XADD', KEYS[1], 'MAXLEN', '0', '*', 'lost', ''), 1
end
call('HSET', KEYS[2], 'batch', ARGV[2], 'last', last, 'added', string.format('%d', added + entries))
if first then call('HSET', KEYS[2], 'lanes', ARGV[3], 'keep', ARGV[5]) end
if replayed then call('HSET', KEYS[2], 'replayed', replayed) end
if ARGV[6] == 'restart' then
  call('HDEL', KEYS[2], 'replayed')
  call('HSET', KEYS[2], 'absent', string.format('%d', added - length))
  if first then call('HSET', KEYS[2], 'since', first) end
end
return ARGV[2]
