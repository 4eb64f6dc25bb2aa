cimport cython
from libc cimport math
from moesim.policies.assignment._list_scheduler cimport ListScheduler
from moesim.policies.base cimport MachineView, PrefetchPolicy, Work
from moesim.policies.prefetch._ranked cimport is_present

cdef int IN_FLIGHT, NONE
cdef double _PICOSECONDS, _UNKNOWN, _INF

cdef class LayerAhead:
    cdef int layer, count, place
    cdef double copy_s, begins_s, before_s, after_s, gain_s, left_s
    cdef int[::1] ids, tokens
    cdef signed char[::1] present, lanes
    cdef double[::1] cpu_s
    cdef double[:, ::1] gpu_s
    cdef long long[::1] order
    cdef ListScheduler schedule
    @cython.locals(count=int, expert=int, tokens=int, there=bint)
    cdef predict(self, MachineView view, int depth, int layer)
    cdef double makespan_s(self, double first_s) except? -1.0
    @cython.locals(schedule=ListScheduler, n=int, place=int, arrive_s=double, after_s=double, gain_s=double)
    cdef weigh(self, double first_s, double left_s)
    cdef take(self)

cdef class Impact(PrefetchPolicy):
    cdef public double discount
    cdef public long long most
    cdef list ahead
    cdef double[:, ::1] gpu_s
    cdef signed char[::1] lanes
    cdef long long[::1] order
    cdef ListScheduler schedule
    @cython.locals(depths=int, ends_s=double, copies="long long", start_s=double, wanted=Py_ssize_t, d=int, ahead=LayerAhead, place=int)
    cpdef long long prefetch(self, Work work, MachineView view, long long[::1] named) except? -1
    @cython.locals(schedule=ListScheduler, i=int, g=int, gpu_s=double, arrive_s=double, comes_s=double)
    cdef double _current_s(self, Work work) except? -1.0
    @cython.locals(copy_s=double, copies=double)
    cdef long long _copies(self, Work work, MachineView view, double ends_s) except? -1
    @cython.locals(d=int, ahead=LayerAhead)
    cdef _foresee(self, Work work, MachineView view, int depths, double ends_s)
    @cython.locals(nearest=int, most_s=double, d=int, ahead=LayerAhead, left_s=double, gain_s=double)
    cdef int _most_wanted(self, Work work, int depths, double start_s) except? -2
