cimport cython
from moesim.policies.base cimport AssignmentPolicy, Gate, MachineView, PrefetchPolicy, RoutingPolicy, Work
from moesim.engine.gate_mass cimport gate_mass_kept
from moesim.engine.block cimport Block
from moesim.engine.host cimport Host
from moesim.engine.memory cimport Link, Memory, contains
from moesim.engine.plan cimport Copies, Plan

cdef int ABSENT, CPU, DECODE, DEFERRED, IN_FLIGHT, NONE, RESIDENT, WAITS
cdef int NO_PLACE, LATE_WAIT, FETCH, PREFETCH, READ, REPLACE, KEPT_LAYERS
cdef double INFINITE_S

cdef class Rules:
    cdef public int layers, experts, gpus, rows, late
    cdef public long long budget_bytes
    cdef public double choosing_s
    cdef public bint splits_layers, prefetches, requeues, sees_future, reads_routing, alters, places_on_gpu, precomputes, defers, replaces_first, looks_back
    cdef public dict names

cdef class UsedRouting:
    cdef public const unsigned short[:, ::1] experts
    cdef unsigned short[:, ::1] _own
    cdef const unsigned short[:, ::1] _shown
    @cython.locals(t=Py_ssize_t, place=Py_ssize_t)
    cdef keep(self, unsigned short[::1] routing, Py_ssize_t rows, Py_ssize_t columns)
    cdef _make(self, Py_ssize_t rows, Py_ssize_t columns)

cdef class Planner:
    cdef public object shape, costs, policies, sizes, reads
    cdef public Rules rules
    cdef public int layers, experts, gpus
    cdef public list gpu, observers, gate_mass
    cdef public Host host
    cdef public MachineView view
    cdef public AssignmentPolicy assignment
    cdef public PrefetchPolicy prefetch
    cdef public RoutingPolicy routing
    cdef public double now_s, joined_s
    cdef public int place
    cdef public Plan planned
    cdef public Gate gate
    cdef Gate _next_gate
    cdef public bint alters_now
    cdef public const long long[::1] size_of
    cdef public const double[:, ::1] cpu_s, gpu_s
    cdef public Block block
    cdef public Work work, nobody
    cdef signed char[::1] state
    cdef double[::1] work_cpu_s, host_s, link_s
    cdef double[:, ::1] work_gpu_s, arrive_s
    cdef signed char[:, ::1] gpu_state
    cdef int[::1] ranks, _counts
    cdef long long[::1] _keys, _named, _outgoing, _incoming, _unread, _deferred_last
    cdef unsigned char[::1] _seen, _started, _started_in
    cdef public unsigned short[::1] routed
    cdef public int routed_columns
    cdef public list _firsts
    cdef public long long _most_tokens
    cdef list _recent
    cdef const double[:, ::1] _predicted
    cpdef by_key(self, seconds_of)
    @cython.locals(most="long long")
    cpdef put(self, Block block)
    cdef _look_costs_up(self, tokens)
    cdef _by_size(self, seconds_of, tokens)
    cdef _tell_plan(self, Work work, Plan plan)
    cdef _tell(self, str call, tuple arguments, answer)
    cpdef int home(self, int layer) except -1
    @cython.locals(rules=Rules, plan=Plan, work=Work, layer=int, at_home=int, gpu=int, waits=bint)
    cpdef Plan plan(self, int s, double now_s)
    @cython.locals(plan=Plan, n=Py_ssize_t, memory=Memory, i=int, key="long long")
    cpdef Plan complete(self, Work work, double now_s)
    cdef UsedRouting _kept(self, int layer)
    cdef const unsigned short[:, ::1] _routing_of(self, int s)
    @cython.locals(block=Block, routing="const unsigned short[:, ::1]")
    cdef const unsigned short[:, ::1] _recorded(self, int s)
    @cython.locals(block=Block)
    cdef const double[:, ::1] _rows_of(self, const double[:, ::1] column, int s)
    @cython.locals(block=Block, gate=Gate, experts=int, layer=int, routing="unsigned short[::1]", columns=int, first="long long", count=Py_ssize_t, expert=int, n="long long")
    cdef _route(self, int s)
    @cython.locals(block=Block, work=Work, host=Host, now_s=double, begin="long long", end="long long", active=int, layer=int, first="long long", experts="const int[::1]", tokens="const int[::1]", i=int, key="long long", at_home=int, several=bint, row=int, memory=Memory, link=Link, left_s=double, here="signed char", arrive_s=double)
    cdef _look(self, int s)
    @cython.locals(experts=int, routing="const unsigned short[:, ::1]", rows=int, columns=int, expert=int, t=int, place=int, work=Work, i=int)
    cdef _rank(self, int s)
    @cython.locals(active=int, lanes="signed char[::1]", order="long long[::1]", i=int, most=int, legal=bint, place="long long", at_home=int)
    cdef _assign(self, Work work, Plan plan)
    @cython.locals(i=int, deferred=bint, key="long long")
    cdef _defer(self, Work work, Plan plan)
    @cython.locals(memory=Memory)
    cdef bint _is_kept_in_host(self, long long key) except -1
    @cython.locals(last="long long[::1]", count=Py_ssize_t, n=Py_ssize_t)
    cdef _launch_deferred_last(self, Plan plan, long long[::1] order)
    @cython.locals(rules=Rules, block=Block, gpu=int, memory=Memory, i=int, key="long long", at_home=int, first="long long")
    cdef _note_accesses(self, Work work, Plan plan)
    @cython.locals(key=Py_ssize_t)
    cdef _forget_wrong_guesses(self, Memory memory, Py_ssize_t first)
    @cython.locals(memory=Memory)
    cdef _queue(self, Plan plan, int kind, int gpu, long long key, bint read)
    @cython.locals(promoted=Copies, n=Py_ssize_t)
    cdef _note_promoted(self, Plan plan, int gpu, long long key)
    @cython.locals(rules=Rules, everything=bint, first="long long", gpu=int, memory=Memory, count=Py_ssize_t, n=Py_ssize_t, key="long long")
    cdef _promote_due(self, int layer, Plan plan)
    @cython.locals(replaced="long long")
    cdef _promote_one(self, Plan plan, Memory memory, int gpu, long long key, bint everything)
    @cython.locals(memory=Memory, count=Py_ssize_t, n=Py_ssize_t, i="long long", key="long long", keys="long long[::1]", host=Host, read=bint)
    cdef _demand(self, Work work, Plan plan, int gpu)
    @cython.locals(row=int, first_s=double, i=int, exposed_s=double)
    cdef _note_exposed(self, Work work, Plan plan, int gpu, long long[::1] keys)
    @cython.locals(host=Host, memory=Memory, count=Py_ssize_t, unread=Py_ssize_t, n=Py_ssize_t, i="long long", key="long long", reads="long long[::1]")
    cdef _read_for_cpu(self, Work work, Plan plan)
    @cython.locals(experts=int, at_home=int, gpu=int, memory=Memory, count=Py_ssize_t, n=Py_ssize_t, here=bint)
    cdef bint _can_stage_all(self, int layer, Plan plan) except -1
    @cython.locals(rules=Rules, block=Block, view=MachineView, layer=int, memory=Memory, first="long long", nobody="const unsigned short[:, ::1]")
    cdef _show(self, int s)
    @cython.locals(count="long long", named="long long[::1]", last=int, layer=int, n=Py_ssize_t)
    cdef _prefetch(self, Work work, Plan plan, int s)
    @cython.locals(plan=Plan, view=MachineView, memory=Memory, first="long long", count="long long")
    cpdef Plan foretell(self, long long drafted, double draft_s, double now_s)
    @cython.locals(named="long long[::1]", n=Py_ssize_t)
    cdef long long[::1] _checked(self, long long count)
    @cython.locals(rules=Rules, n=Py_ssize_t, memory=Memory, left_bytes="long long", key="long long", layer=int, gpu=int, awaited=bint, read=bint)
    cdef _wish_for(self, Work work, Plan plan, long long[::1] named)
    cdef bint _needs_read(self, Work work, long long key, bint demanded) except -1
    @cython.locals(memory=Memory, first="long long", key=Py_ssize_t)
    cdef _unshield(self, int layer)
    @cython.locals(at_home=int, gpu=int, memory=Memory, count="long long", n=Py_ssize_t, going="long long", coming="long long", enters=bint)
    cdef _ask_replacements(self, Work work, Copies swaps)
    @cython.locals(memory=Memory, read=bint)
    cdef _wish_swap(self, Work work, Plan plan, int gpu, long long going, long long key, bint demanded)
    @cython.locals(i=int)
    cdef int _place_of(self, Work work, long long key) except -2
    @cython.locals(asked=Copies, rows=int, at_home=int, row=int, gpu=int, memory=Memory, lands_s=double, n=Py_ssize_t, coming=int, going=int, i=int, gone=bint)
    cdef _replace_first(self, Work work, Plan plan)
    @cython.locals(at_home=int, asked=Copies, n=Py_ssize_t, going=int)
    cdef _keep_computed(self, Work work, Plan plan)
    @cython.locals(asked=Copies, n=Py_ssize_t, gpu=int, key="long long", outgoing="long long", going=int, coming=int, memory=Memory, awaited=bint)
    cdef _wish_first(self, Work work, Plan plan)
    @cython.locals(i=int, key=Py_ssize_t)
    cdef _take_precomputed(self, Work work, Plan plan)
    @cython.locals(block=Block, gate=Gate, tokens="int[::1]", expert=int, layer=int, host=Host, key="long long", memory=Memory, columns=int)
    cdef _precompute(self, int s, Plan plan)
    @cython.locals(memory=Memory, link=Link, landing_s=double, demanded=bint, place=int, idle="long long")
    cpdef bint start_copy(self, int gpu, long long key, double now_s) except -1
    @cython.locals(memory=Memory, replaced="long long", left=bint, fits=bint)
    cpdef bint gives_up(self, int gpu, long long key) except -1
    @cython.locals(memory=Memory)
    cpdef cancel_copy(self, int gpu, long long key)
    @cython.locals(memory=Memory, freed=bint)
    cpdef bint landed(self, int gpu, long long key) except -1
    @cython.locals(memory=Memory, link=Link, landing_s=double, place=int)
    cpdef bint start_read(self, long long key, double now_s) except -1
    @cython.locals(memory=Memory)
    cpdef cancel_read(self, long long key)
    @cython.locals(freed=bint)
    cpdef bint read_done(self, long long key) except -1
    @cython.locals(memory=Memory, freed=bint)
    cpdef bint computed(self, int gpu, long long key) except -1
    @cython.locals(freed=bint)
    cpdef bint unawaited_ended(self, long long key) except -1
