"""Where llama.cpp puts every tensor, written from its loader and not from our bill."""

import re

MIB = 1024**2


def option(flags, name, default=None):
    return flags[flags.index(name) + 1] if name in flags else default


def placed(model, flags, cards, context, kv_bytes_per_value=2):
    """Where llama.cpp puts every tensor: bytes by card, and on the processor.

    Written from llama.cpp's loader, not from moesim's bill: layer i of the n that
    ``-ngl`` leaves on the cards goes to the first card whose cumulated ``-ts`` share
    exceeds i / n, the output head counts as one more layer; ``--n-cpu-moe N`` and
    ``-ot`` send matching expert tensors to the processor.
    """
    layers = len(model.layers)
    on_cards = min(int(option(flags, "-ngl", 0)), layers + 1)
    first = layers + 1 - on_cards
    split = [float(part) for part in option(flags, "-ts", "1").split(",")]
    if "-ts" not in flags:
        split = [card.vram_bytes or 1 for card in cards]
    summed = [sum(split[: at + 1]) / sum(split) for at in range(len(split))]
    to_cpu = []
    if "--cpu-moe" in flags:
        to_cpu.append(re.compile("_exps"))
    count = int(option(flags, "--n-cpu-moe", 0))
    to_cpu += [
        re.compile(rf"blk\.{at}\.ffn_(up|down|gate)_exps") for at in range(count)
    ]
    if "-ot" in flags:
        to_cpu.append(re.compile(option(flags, "-ot").removesuffix("=CPU")))

    used = [0.0] * len(cards)
    host = float(model.embed_bytes)
    for at in range(layers + 1):
        place = None
        if at >= first:
            share = (at - first) / on_cards
            place = next(card for card, end in enumerate(summed) if share < end)
        if at == layers:
            tensors = {"output.weight": model.head_bytes}
        else:
            layer = model.layers[at]
            kv = layer.kv_bytes_per_token * kv_bytes_per_value / 2
            window = layer.window_tokens or context
            tensors = {
                f"blk.{at}.attn": layer.dense_bytes + kv * min(context, window),
                f"blk.{at}.ffn_up_exps.weight": layer.expert_bytes / 3,
                f"blk.{at}.ffn_gate_exps.weight": layer.expert_bytes / 3,
                f"blk.{at}.ffn_down_exps.weight": layer.expert_bytes / 3,
            }
        for name, stored in tensors.items():
            if place is None or any(rule.search(name) for rule in to_cpu):
                host += stored
            else:
                used[place] += stored
    return used, host
