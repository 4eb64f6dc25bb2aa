"""What engines logged of their memory, and what `advise` bills for the same."""

from pathlib import Path

import yaml

from moesim.advice.machine import describe_machine
from moesim.advice.model.catalogue import named_contents
from moesim.advice.plan.memory import MIB, Job, bill_of
from moesim.advice.times.work import Setting

_FILE = Path(__file__).parents[1] / "advice" / "logged_memory.yaml"
LOGS = yaml.safe_load(_FILE.read_text(encoding="utf-8"))["logs"]


def billed(log):
    """MiB of keys and values, of recurrences' states, and of compute buffers."""
    model = named_contents(log["model"], log["quant"])
    micro_batch = log.get("micro_batch", 512)
    setting = Setting(
        cpu_layers=len(model.layers)
        if log.get("on_host")
        else log.get("cpu_layers", 0),
        kv_format=log.get("kv_format", "f16"),
        micro_batch=micro_batch,
        batch=max(2048, micro_batch),
    )
    machine = describe_machine(cpu="EPYC 9354", gpu="RTX PRO 6000 Blackwell")
    bill = bill_of(model, machine, setting, Job(context=log["context"]))
    state = sum(layer.state_bytes + layer.waiting_bytes for layer in model.layers)
    return {
        "kept": (bill.gpu["keys and values"] - state) / MIB,
        "state": state / MIB,
        "computing": bill.gpu["compute buffers"] / MIB,
    }
