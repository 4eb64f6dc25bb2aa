cimport cython

#? _end_prefill(book, ttft_s, prefills)
#? _end_sequences(book, alive)
cpdef long long follow_passes(?Structure passes, ?REC[::1] books, double[::1] gaps_s, double[::1] ttft_s, bint is_last) except? -1
