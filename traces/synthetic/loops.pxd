cimport cython
from libc cimport math

@cython.locals(weight=double, mass=double, smallest=double, largest=double, most_mass=double, are_scores=bint, factor=double, least_score=double, score=double, smallest_score=double, most_sigmoid=double)
cdef _weights_to_logits(const float[::1] weights, double last_key, bint renormalised, bint sigmoid, double[::1] logits)

cdef _fitting_mass(const double[::1] rest, double mass, double highest, double[::1] fitted)

@cython.locals(chosen="double[::1]", rest="double[::1]", fitted="double[::1]", used="unsigned char[::1]", expert="long long", total=float, margin=double)
cpdef fill_ordered(const float[:, ::1] keys, const long long[:, ::1] order, const unsigned short[:, ::1] experts, const float[:, ::1] weights, bint renormalised, bint sigmoid, float[:, ::1] logits)

@cython.locals(largest=double, total=double, logit=double, power=double)
cpdef fill_scores(const float[:, ::1] logits, bint sigmoid, float[:, ::1] scores)

@cython.locals(value=double)
cpdef add_moments(const float[:, ::1] logits, double[:, :, ::1] sums, long long[::1] counts)

@cython.locals(keep=float, fresh=float, moved=float)
cpdef remember(float[:, ::1] values, float[::1] last, double memory, bint begun)

@cython.locals(mean=float, deviation=float, ratio=double, kept=double, added=double, size=double, value=double, known=bint)
cpdef fill_predicted(const float[:, ::1] logits, const float[:, ::1] means, const float[:, ::1] noise, const float[::1] difficulty, const float[::1] spread, double fidelity, float[:, ::1] predicted)
