cimport cython
from moesim.policies.base cimport Gate

cdef double SMALLEST

@cython.locals(by_score=bint, rows=Py_ssize_t, columns=Py_ssize_t, top_k=Py_ssize_t, total=double, kept=double, wanted=double, t=Py_ssize_t, column=Py_ssize_t, other=Py_ssize_t, expert=int)
cpdef double gate_mass_kept(Gate gate, const unsigned short[:, ::1] used) except? -2
