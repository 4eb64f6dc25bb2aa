cimport cython
from libc cimport math

@cython.locals(expert=Py_ssize_t, n=Py_ssize_t)
cpdef note_use(double[::1] age, double[::1] uses, const int[::1] experts)

@cython.locals(count=Py_ssize_t, expert=Py_ssize_t, most=double)
cpdef features_of(const double[::1] age, const double[::1] uses, double[::1] features)

@cython.locals(place=Py_ssize_t)
cpdef evaluate(const double[::1] weights, const double[::1] features, double[::1] first_units, double[::1] second_units, double[::1] outputs)

@cython.locals(count=Py_ssize_t, biases=Py_ssize_t, row=Py_ssize_t, i=Py_ssize_t, j=Py_ssize_t)
cdef Py_ssize_t _affine(const double[::1] weights, Py_ssize_t begin, const double[::1] x, double[::1] outputs) except? -1

@cython.locals(n=Py_ssize_t)
cdef _silu(double[::1] x)
