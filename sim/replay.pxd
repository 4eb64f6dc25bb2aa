from moesim.engine.block cimport Block
from moesim.sim.clock cimport VirtualClock
from moesim.engine.layer_step cimport LayerStep
from moesim.engine.operations cimport Machine
from moesim.engine.planner cimport Planner

cdef int DENSE, NONE

cdef class Replay:
    cdef dict __dict__
    cdef public VirtualClock clock
    cdef public Machine machine
    cdef public Planner planner
    cdef public LayerStep layer_step
    cdef public Block block
    cdef double _pass_s
    cdef long long _accesses_held, _full_spans, _full_accesses
    cpdef noted(self, int step)
    cpdef _draft(self, Block block, int s)
    cpdef _drafted(self, Block block, int s, long long drafted)
