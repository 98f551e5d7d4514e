-- Stands before the other scripts of queues: their keys, what is there, and whether it is all.
--
-- KEYS[1]  what the names of all others begin with; nothing is there itself. Since it is never there, a server whose slot is
--          being moved refuses every script until all keys are at one place (TRYAGAIN), so that none sees half of a queue
-- KEYS[2]  hash  :relay  the relay's marker and counts:
--            batch    epoch:seq:token of the last batch that reached the queue
--            added    jobs that were added, and
--            ended    jobs that have left, since the marker's last restart: their difference is outstanding
--            damaged  jobs were missing at that restart: what says that it is ready may be in no list
--            lanes, keep, stays, oldest, replayed, waited: as beside a stream, see marker.lua
--            group    the consumer whose queue it is
--            asked    when one of its workers last asked for jobs, in milliseconds
--            turn     jobs claimed: which priority comes first
-- and, with that beginning:
--          list  :ready:high, :ready:normal, :ready:low   ids of jobs to be done, the next first
--          hash  :processing  id -> the process that has it
--          zset  :claims      id -> until when it has it, unless it renews that; milliseconds by the server's clock
--          zset  :delayed     id -> when it is due, in milliseconds
--          zset  :batches     id of every outstanding job -> number of the batch that brought it, +inf: none
--          zset  :completed, :failed   ids of jobs that have left -> when; the last ones. :failed are all that are not completed
--          hash  :job:<id>    the job: its fields by their names, as a consumer gets them (without data once it has left), and
--            :status  delayed, ready, running, waiting, completed, failed or cancelled
--            :since   since when, :added when it came, :due when it is due; in milliseconds
--            :count   how often it was begun
--            :token   of its last claim; whoever does not know it can change nothing any more
--            :by      the process of that claim
--            :result, :error  what came of it
-- and channels :wake (there is something for whoever waits), :events (what became of a job: its status and id)
--
-- Whatever is outstanding is in :batches and in exactly one of the ready lists, :delayed and :processing. Nothing has a TTL.

local call, base, relay = redis.call, KEYS[1], KEYS[2]
local high, normal, low = base .. ':ready:high', base .. ':ready:normal', base .. ':ready:low'
local processing, claims, delayed = base .. ':processing', base .. ':claims', base .. ':delayed'
local batches, completed, failed = base .. ':batches', base .. ':completed', base .. ':failed'
local job, prefix = base .. ':job:', #base + 6

local function clock()  -- milliseconds, with a fraction
  local now = call('TIME')
  return now[1] * 1000 + now[2] / 1000
end

local function whole(number) return string.format('%.0f', math.floor(number)) end

local function exact(number) return string.format('%.3f', number) end

local function in_chunks(command, key, arguments)  -- as many as Lua can unpack at once; an even number
  for first = 1, #arguments, 1000 do
    call(command, key, unpack(arguments, first, math.min(first + 999, #arguments)))
  end
end

local function sizes()  -- how many jobs each key knows. An error, before anything is written, where one is somebody else's
  local n = {high = call('LLEN', high), normal = call('LLEN', normal), low = call('LLEN', low),
    processing = call('HLEN', processing), claims = call('ZCARD', claims), delayed = call('ZCARD', delayed),
    batches = call('ZCARD', batches), completed = call('ZCARD', completed), failed = call('ZCARD', failed), relay = call('HLEN', relay)}
  n.ready = n.high + n.normal + n.low
  n.all = n.ready + n.delayed + n.processing
  return n
end

local function look(n)  -- the marker ('' for none), and how many jobs are outstanding (nil: not known)
  local found = call('HMGET', relay, 'batch', 'added', 'ended')
  local batch = string.match(found[1] or '', '^%d+:%d+:[%w-]+$') or ''
  local outstanding = (tonumber(string.match(found[2] or '', '^%d+$')) or -1)
    - (tonumber(string.match(found[3] or '0', '^%d+$')) or 0)
  if outstanding < 0 then return '', nil end
  if outstanding > 0 and n.all + n.batches == 0 then return '', outstanding end  -- it stands beside what is lost
  return batch, outstanding
end

local function state(id, ...)  -- these fields of a job; its first is nil, too, where somebody else's key is in its place
  local found = redis.pcall('HMGET', job .. id, ...)
  return found.err and {} or found
end

local function is_outstanding(status) return status == 'delayed' or status == 'ready' or status == 'running' end

local function trim(key, most)  -- let a history have its last ids only, and forget the jobs of the others
  local over = call('ZCARD', key) - most
  if over <= 0 then return end
  local oldest = call('ZPOPMIN', key, over)
  for first = 1, #oldest, 200 do
    local keys = {}
    for each = first, math.min(first + 199, #oldest), 2 do  -- one that was lost may have come again
      if not is_outstanding(state(oldest[each], ':status')[1]) then keys[#keys + 1] = job .. oldest[each] end
    end
    if #keys > 0 then call('DEL', unpack(keys)) end
  end
end

local function list_of(priority) return priority == 'high' and high or priority == 'low' and low or normal end

local function wake(n)  -- whoever waits; nobody does where something was ready before. Rights on channels may be missing
  if n.ready == 0 then redis.pcall('PUBLISH', base .. ':wake', '') end
end

local function checked_group(group)  -- an error reply where the queue is not this consumer's
  if call('HGET', relay, 'group') == group then return nil end
  return redis.error_reply('NOGROUP this queue is not, or no longer, the queue of consumer ' .. group)
end

