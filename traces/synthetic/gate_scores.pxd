cimport cython

cpdef _weights_to_logits(const float[::1] weights, double last_key, bint renormalised, bint sigmoid, double[::1] logits)
cpdef _fitting_mass(double[::1] rest, double mass, double highest)
cpdef fill_logits(const float[:, ::1] keys, const unsigned short[:, ::1] experts, const float[:, ::1] weights, bint renormalised, bint sigmoid, float[:, ::1] logits)
cpdef fill_scores(const float[:, ::1] logits, bint sigmoid, float[:, ::1] scores)
