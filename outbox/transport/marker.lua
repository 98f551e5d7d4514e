-- Stands before publish.lua and inspect.lua: what is in the stream, and whether the marker beside it is still its own.
--
-- KEYS[1]  stream   the stream that consumers read
-- KEYS[2]  hash     the relay's marker beside it:
--            batch   epoch:seq:token of the last batch that reached the stream
--            last    the stream's last-generated-id after that batch
--            added   the stream's entries-added after that batch
--            lanes   number of lanes of the topic
--            keep    seconds for which the outbox keeps events, for consumers to compare with their ledger's
--            stays   seconds for which entries stay that every group has acknowledged
--            oldest  Unix time before which no event was recorded that may come again (see leave in base.py)
--            since   id of the first entry after the marker's last restart: from there on batches are numbered upwards
--            absent  entries-added minus length at that restart, plus what we trimmed since
--            replayed  when the first entries of no batch were added since then, in microseconds of Unix time, and how often
--                    that was done: who adds them sees by it that they are lost
--            waited  says nothing: written to have something to wait for (see confirm in stream.py)
--
-- Whatever is lost, the marker shows it: it is lost too, or older (restored dump, failover), or it stands beside a stream
-- that is missing or was made anew (fewer entries added, or a smaller last id), which counts as no marker. So does what
-- somebody else wrote there.

local call = redis.call

local function named(list)  -- a flat list of names and values as a table
  local found = {}
  for i = 1, #list, 2 do found[list[i]] = list[i + 1] end
  return found
end

local function earlier(a, b)  -- whether stream id a is before b; both parts are compared by length, then as text
  local function less(x, y) return #x < #y or (#x == #y and x < y) end
  local a1, a2 = string.match(a, '^(%d+)-(%d+)$')
  local b1, b2 = string.match(b, '^(%d+)-(%d+)$')
  return less(a1, b1) or (a1 == b1 and less(a2, b2))
end

local function look()  -- the marker ('' for none), XINFO STREAM (nil for none), since and absent (nil where not known)
  local stream = call('EXISTS', KEYS[1]) == 1 and named(call('XINFO', 'STREAM', KEYS[1])) or nil
  local found = call('HMGET', KEYS[2], 'batch', 'last', 'added', 'since', 'absent')
  local function is(i, pattern) return string.match(found[i] or '', pattern) end
  local batch, last, added = is(1, '^%d+:%d+:[%w-]+$'), is(2, '^%d+%-%d+$'), tonumber(is(3, '^%d+$'))
  if not (stream and batch and last and added)
      or stream['entries-added'] < added or earlier(stream['last-generated-id'], last) then
    return '', stream, nil, nil
  end
  return batch, stream, is(4, '^%d+%-%d+$'), tonumber(is(5, '^%d+$'))
end

