cimport cython

cpdef _count(const short[::1] layer, const unsigned short[:, ::1] experts, long long[:, ::1] load)
cpdef bint _repeats(const unsigned short[:, ::1] first_choice) except -1
