-- Look at one stream and how far its groups are; trim what all of them have acknowledged, if asked.
--
-- KEYS[1]  stream   the stream that consumers read
-- KEYS[2]  hash     the relay's marker beside it, see publish.lua; here also written:
--            absent  entries-added minus length, as far as we know why: what we trimmed
-- ARGV[1]  '' to look only; or milliseconds: trim what is older than that and acknowledged by every group
-- ARGV[2…] groups without which nothing is trimmed: declared, but perhaps lost by the server
--
-- Returns {length, missing, trimmed, epoch, seq, groups}: `missing` entries were taken by strangers since the last restart of
-- the marker, `trimmed` by this call, `seq` is the newest batch there, `epoch` its epoch; a group is {name, pending, id of the oldest pending
-- entry ('' for none), batch it still needs, batch of its first undelivered entry, undelivered entries of that batch, milliseconds since one
-- of its consumers asked for something (-1: it has none)}. A
-- batch is 0 where nothing is left, and -1 where the entry stands before the marker's restart, so that its batch number
-- may be of another count.
--
-- Nothing is written at ARGV[1] = ''. XTRIM and HDEL work at full memory; where HINCRBY is refused `absent` is forgotten,
-- and one entry is said to be missing until the next restart of the marker: rather published twice than never.

local call = redis.call

local function earlier(a, b)  -- whether stream id a is before b; both parts are compared by length, then as text
  local function less(x, y) return #x < #y or (#x == #y and x < y) end
  local a1, a2 = string.match(a, '^(%d+)-(%d+)$')
  local b1, b2 = string.match(b, '^(%d+)-(%d+)$')
  return less(a1, b1) or (a1 == b1 and less(a2, b2))
end

local function named(list)
  local found = {}
  for i = 1, #list, 2 do found[list[i]] = list[i + 1] end
  return found
end

if call('EXISTS', KEYS[1]) == 0 then return {0, 0, 0, 0, 0, {}} end
local marker = call('HMGET', KEYS[2], 'batch', 'absent', 'since', 'last', 'added')
local now_there = named(call('XINFO', 'STREAM', KEYS[1]))
if not marker[4] or not marker[5] or now_there['entries-added'] < tonumber(marker[5])
    or earlier(now_there['last-generated-id'], marker[4]) then
  marker = {false, false, false}  -- of a stream that is no more, see publish.lua: what it says is not acknowledged here
end
local epoch, seq = string.match(marker[1] or '', '^(%d+):(%d+):.')
local since = marker[3]
epoch, seq = tonumber(epoch or '0'), tonumber(seq or '0')

local function batch_from(start)  -- the batch that the first entry from `start` on belongs to, and entries up to its end
  local count = 0
  while true do
    local entries = call('XRANGE', KEYS[1], start, '+', 'COUNT', 100)
    if count == 0 and #entries > 0 and (not since or earlier(entries[1][1], since)) then return -1, 0 end
    for i = 1, #entries do
      local fields = entries[i][2]
      count = count + 1
      if fields[#fields - 1] == 'batch' then return tonumber(fields[#fields]) or -1, count end
    end
    if #entries < 100 then return 0, count end
    start = '(' .. entries[#entries][1]
  end
end

local groups, names, limit = {}, {}, false
if ARGV[1] ~= '' then
  local now = call('TIME')
  limit = string.format('%d-0', math.max(now[1] * 1000 + math.floor(now[2] / 1000) - ARGV[1], 0))
end
for _, info in ipairs(call('XINFO', 'GROUPS', KEYS[1])) do
  local group = named(info)
  local delivered, oldest = group['last-delivered-id'], ''
  local undelivered, in_it = batch_from('(' .. delivered)
  local needed, keep = undelivered, delivered
  if group['pending'] > 0 then
    oldest = call('XPENDING', KEYS[1], group['name'])[2]
    needed, keep = batch_from(oldest), oldest
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
  trimmed = call('XTRIM', KEYS[1], 'MINID', limit)
  if trimmed > 0 and marker[2] and type(redis.pcall('HINCRBY', KEYS[2], 'absent', trimmed)) == 'table' then
    call('HDEL', KEYS[2], 'absent')
    marker[2] = false
  end
end
local stream = named(call('XINFO', 'STREAM', KEYS[1]))
local missing = marker[3] and 1 or 0
if marker[2] then missing = stream['entries-added'] - stream['length'] - tonumber(marker[2]) - trimmed end
return {stream['length'], math.max(missing, 0), trimmed, epoch, seq, groups}
