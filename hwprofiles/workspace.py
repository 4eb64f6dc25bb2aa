"""Graphics memory that an engine needs besides weights, keys and values."""

MIB = 1024**2

# A driver's context, its kernels and the engine's own buffers on one card.
# Source: what nvidia-smi shows beside llama.cpp's own sums, 300 to 600 MiB.
CONTEXT_BYTES = 450 * MIB
ACTIVATION_BYTES = 4
# Activations of one layer that live at the same time, as multiples of T x H values.
LIVE_ACTIVATIONS = 12
