"""Hardware profiles as nested tables, before they are parsed."""


def number(value, kind="assumed", **more):
    return {"value": value, "kind": kind, "source": "a test", **more}


def raw_profile(**changes):
    """A two-core machine without a GPU, as nested tables."""
    tables = {
        "name": "tiny",
        "kind": "measured",
        "description": "a machine that exists only here",
        "date": "2026-01-01",
        "accelerator": "host",
        "workers": {
            "cpu": ["control", "cpu"],
            "accelerator": ["gpu0", "h2d0", "d2h0"],
            "ssd": ["ssd"],
        },
        "cores": number(2),
        "memory": {
            "gpu_bytes": number(1 << 30),
            "host_bytes": number(1 << 31),
            "staging_experts": number(2),
        },
        "costs": {"h2d": {"latency_s": number(1e-5), "bytes_per_s": number(1e10)}},
    }
    return tables | changes
