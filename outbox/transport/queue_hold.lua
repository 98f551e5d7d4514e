-- Renew claims, count them anew, give them to an heir, or give them back: of those only that are this process's (or those of one
-- that is gone) by their tokens. Also where memory is full.
--
-- KEYS     see queue.lua, which stands before this
-- ARGV[1]  'keep' or 'back'
-- ARGV[2]  milliseconds of a claim
-- ARGV[3]  the process
-- ARGV[4]  the process that has them: the same, or one that is gone and whose heir it is
-- ARGV[5…] ids, each followed by its token and its count; '' leaves that
--
-- Returns those that were its, each as id:token.

local n, time = sizes(), clock()
local back, span, process, late = ARGV[1] == 'back', tonumber(ARGV[2]), ARGV[3], ARGV[4]
local now, deadline = whole(time), exact(time + span)
local ours, running, held, again = {}, {}, {}, {}
for at = 5, #ARGV, 3 do
  local id, count = ARGV[at], ARGV[at + 2]
  local found = state(id, ':status', ':token', ':by', 'priority')
  if found[1] == 'running' and found[2] == ARGV[at + 1] and found[3] == late then
    ours[#ours + 1] = id .. ':' .. ARGV[at + 1]
    if count ~= '' then call('HSET', job .. id, ':count', count) end
    if back then
      call('HSET', job .. id, ':token', '')
      if tonumber(count) > 1 then  -- it may end its process: it is for those who take it over and run it alone
        held[#held + 1], held[#held + 2] = exact(time), id
      else
        call('HSET', job .. id, ':status', 'ready', ':since', now)
        call('HDEL', processing, id)
        call('ZREM', claims, id)
        again[#again + 1] = {list_of(found[4]), id}
      end
    else
      if process ~= late then call('HSET', job .. id, ':by', process) end
      running[#running + 1], running[#running + 2] = id, process
      held[#held + 1], held[#held + 2] = deadline, id
    end
  end
end
for at = #again, 1, -1 do call('LPUSH', again[at][1], again[at][2]) end  -- before what came after them
if #again > 0 then wake(n) end
in_chunks('HSET', processing, running)
in_chunks('ZADD', claims, held)
return ours
