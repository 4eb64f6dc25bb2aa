cimport cython

cpdef _next_places(const long long[::1] place, const long long[::1] edges, const int[::1] experts, long long layers, long long width, long long[::1] first_use)
