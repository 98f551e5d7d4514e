-- Publish one batch to one stream, if the stream is where the batch expects it: a compare-and-set. Also, with an empty
-- marker afterwards, a plain look at the marker; and, without entries, a change of the marker alone.
--
-- KEYS[1]  stream   the stream that consumers read
-- KEYS[2]  hash     the relay's marker beside it:
--            batch   epoch:seq:token of the last batch that reached the stream
--            last    the stream's last-generated-id after that batch
--            added   the stream's entries-added after that batch
--            lanes   number of lanes of the topic
--            keep    seconds for which the outbox keeps events, for consumers to compare with their ledger's
--            since   id of the first entry after the marker's last restart: from there on batches are numbered upwards
--            absent  entries-added minus length at that restart, plus what we trimmed since (see inspect.lua)
--            waited  says nothing: written to have something to wait for (see confirm in stream.py)
-- ARGV[1]  the marker expected ('' for none)
-- ARGV[2]  the marker afterwards ('' to look only)
-- ARGV[3]  number of lanes
-- ARGV[4]  msgpack: the list of runs of entries with the same fields; a run is the list of the fields' names, followed
--          by the list of all entries' values for each of them; names and values are strings
-- ARGV[5]  seconds for which the outbox keeps events
-- ARGV[6]  '1' for a restart: the batch does not follow the expected one, so that batches may be in the stream twice
--
-- Returns the marker that is there afterwards, '' for none. The batch is in the stream if that is ARGV[2].
--
-- Whatever is lost, the marker shows it: it is lost too, or older (restored dump, failover), or it stands beside a
-- stream that is missing or was made anew (fewer entries added, or a smaller last id), which counts as no marker.
-- Nothing is written before everything has been read and compared; a refusal for lack of memory, a read-only replica
-- and the like comes at the first write, so that a batch is added whole or not at all. A crash in between can at worst
-- leave entries without a marker, which are then published again.

local call = redis.call

local function later(a, b)  -- whether stream id a is after b; both parts are compared by length, then as text
  local function less(x, y) return #x < #y or (#x == #y and x < y) end
  local a1, a2 = string.match(a, '^(%d+)-(%d+)$')
  local b1, b2 = string.match(b, '^(%d+)-(%d+)$')
  return less(b1, a1) or (a1 == b1 and less(b2, a2))
end

local function state()  -- last-generated-id, entries-added and length; nil, 0, 0 where there is no stream
  if call('EXISTS', KEYS[1]) == 0 then return nil, 0, 0 end
  local info, found = call('XINFO', 'STREAM', KEYS[1]), {}
  for i = 1, #info, 2 do found[info[i]] = info[i + 1] end
  return found['last-generated-id'], found['entries-added'], found['length']
end

local marker = call('HMGET', KEYS[2], 'batch', 'last', 'added')
local current = marker[1] or ''
local last, added, length = state()
if not string.find(current, '^%d+:%d+:.') then current = '' end  -- not ours: as good as none, see Marker.parse
if current ~= '' and (not last or not marker[2] or not marker[3] or added < tonumber(marker[3]) or later(marker[2], last)) then
  current = ''
end
if ARGV[2] == '' or current ~= ARGV[1] or (current == ARGV[2] and ARGV[6] ~= '1') then return current end

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
call('HSET', KEYS[2], 'batch', ARGV[2], 'last', last, 'added', string.format('%d', added + entries))
if first then call('HSET', KEYS[2], 'lanes', ARGV[3], 'keep', ARGV[5]) end
if ARGV[6] == '1' then
  call('HSET', KEYS[2], 'absent', string.format('%d', added - length))
  if first then call('HSET', KEYS[2], 'since', first) end
end
return ARGV[2]
