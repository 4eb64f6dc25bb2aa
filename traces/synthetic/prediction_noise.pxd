cimport cython

cpdef _remember(float[:, ::1] values, float[::1] last, double memory, bint begun)
cpdef fill_predicted(const float[:, ::1] logits, const float[:, ::1] means, const float[:, ::1] noise, const float[::1] difficulty, const float[::1] spread, double fidelity, float[:, ::1] predicted)
