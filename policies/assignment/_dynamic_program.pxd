cimport cython

cdef double inf, TOLERANCE, NOISE
cdef int MIXES, BISECTIONS, FIRST_ROWS, MOST_ROWS, NEIGHBOURS, MANY_NEIGHBOURS, FIRST_NODES

cdef class LaneSearch:
    cdef public int gpus, active
    cdef public double first_s, makespan_s, bound_s
    cdef public double[::1] cpu_s, link_s, busy_s
    cdef public double[:, ::1] gpu_s, copy_s, landing_s
    cdef public long long[::1] order
    cdef public signed char[::1] lanes
    cdef int mixes
    cdef double[::1] share, load_s, regret, child, parent
    cdef double[:, ::1] price, remainder, rows, extended
    cdef unsigned char[:, ::1] settled
    cdef long long[::1] origin, extended_origin, cursor
    cdef long long[:, ::1] tree
    cdef long long nodes
    cdef double slack_s
    @cython.locals(n=int, m=int, i="long long", place=int, order="long long[::1]", lost_s=double)
    cpdef solve(self, int free)
    @cython.locals(g=int, i=int, m=int, mix=double, best=double, second=double, cost=double)
    cdef _find_prices(self)
    @cython.locals(lanes=int, lane=int, a=int, b=int, _=int)
    cdef _balance(self, double mix)
    @cython.locals(both=double, low=double, high=double, middle=double, _=int)
    cdef _balance_pair(self, double mix, int a, int b)
    @cython.locals(lane=int, g=int, i=int, added_s=double, best=double, gpu_s=double)
    cdef _load(self, double mix)
    @cython.locals(m=int, n=int, g=int, i="long long", least=double, compute=double, copy=double)
    cdef _price_remainder(self)
    @cython.locals(n=int, g=int, i="long long", arrives=bint)
    cdef _find_settled(self)
    @cython.locals(g=int)
    cdef _reset(self, double[::1] clocks)
    @cython.locals(child="double[::1]", first_s=double, g=int, compute=int, link=int, arrivals=int, gpu_s=double)
    cdef _advance(self, int lane, long long i)
    @cython.locals(g=int, end_s=double)
    cdef double _end_s(self) except? -1
    @cython.locals(child="double[::1]", m=int, g=int, least_s=double, value=double)
    cdef double _least_s(self, int n) except? -1
    @cython.locals(n=int, i="long long", lane=int, end_s=double, lane_s=double)
    cdef _answer_greedily(self)
    @cython.locals(k=int, n=int, j=int, count=int, kept=int, nodes="long long", lost_s=double)
    cdef double _pass(self, int limit) except? -1
    @cython.locals(rows="double[:, ::1]", origin="long long[::1]")
    cdef _swap(self)
    @cython.locals(k=int, n=int, end_s=double, node="long long")
    cdef _take_if_better(self, int j)
    @cython.locals(i="long long", lane=int, kept=int, row="long long")
    cdef int _extend(self, int n, int count, int limit) except? -2
    @cython.locals(earliest=int, earliest_s=double, lane=int, clock_s=double, first_s=double)
    cdef int _next_lane(self, long long i, int count) except? -2
    @cython.locals(child="double[::1]", k=int, g=int, end_s=double)
    cdef _make_child(self, int n, long long row, int lane)
    @cython.locals(slack_s=double, neighbours=int, j=int, k=int, ahead=bint)
    cdef bint _dominated(self, int kept) except -1
    @cython.locals(k=int)
    cdef _keep(self, int kept, long long row, int lane)
