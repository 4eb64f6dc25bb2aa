"""Every Mixture-of-Experts family of the installed transformers runs live, is recorded,
and answers from a store, as the library's own model does.
"""

import pytest
import torch
from support.families import AROUND_TEXT, OWN_KIND, families, family, tiny_config
from support.real_machine import Case
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moesim.base.errors import StoreError, TraceError
from moesim.policies.sizes import CacheSize, MemoryPlan
from moesim.policies.systems import System
from moesim.runtime.executor.live import live_shape, verify
from moesim.runtime.models.gates import offloadable_blocks
from moesim.runtime.models.local_model import LocalModel, generate
from moesim.runtime.models.offloaded import OffloadedModel, stored_model
from moesim.runtime.record.record import GateRecorder
from moesim.runtime.store.build import build_store

torch.set_num_threads(1)

CHOICE_ONLY = {"zaya"}
"""Families whose gates do not show a score for every expert: one class more than
experts skips them all.
"""

PROMPTS = [[5, 60, 7, 111], [99, 3, 200, 14, 15, 92, 6]]
NEW = 2


@pytest.mark.parametrize("model_type", families())
def test_a_family_answers_live_recorded_and_from_a_store(model_type, tmp_path):
    if reason := families()[model_type]:
        pytest.skip(reason)
    plain = family(model_type).model
    plain.save_pretrained(tmp_path / "m")
    with build_store(tmp_path / "m", tmp_path / "s") as store:
        offloaded = OffloadedModel.load(tmp_path / "m")
        shape = live_shape(offloaded, tmp_path / "m", store)
        local = LocalModel(model_type, offloaded.model)
        case = Case(plain, store, offloaded, shape, local)
        size = CacheSize.of(shape.expert_bytes, shape.experts, slots_per_layer=3)
        live, *_ = case.run(
            System("greedy"), MemoryPlan(size), batch=2, prompts=PROMPTS, new=NEW
        )
    verdict = verify(plain, live.result.passes, "float32")
    assert verdict.passed, verdict

    with stored_model(tmp_path / "m", tmp_path / "s", host_bytes=1 << 16) as stored:
        if model_type in CHOICE_ONLY:
            with pytest.raises(TraceError, match="shows only its choice"):
                recorded(stored)
        scores = model_type not in CHOICE_ONLY
        from_store, stored_logits = recorded(stored, scores=scores)
    from_memory, logits = recorded(LocalModel(model_type, plain), scores=scores)
    routed = [
        (layer.layer, *sorted(experts.tolist()))
        for step in live.result.steps
        for layer in step.layers
        for experts in layer.routing
    ]
    assert from_store == from_memory
    assert sorted(routed) == sorted(from_memory)
    scale = max(1.0, float(logits.abs().max()))
    assert float((stored_logits - logits).abs().max()) <= 1e-5 * scale


@pytest.mark.parametrize(
    "model_type", [name for name, why in families().items() if why == AROUND_TEXT]
)
def test_what_is_skipped_has_a_text_model_that_is_not(model_type):
    text = CONFIG_MAPPING[model_type]().get_text_config().model_type
    assert families()[text] is None


@pytest.mark.parametrize("model_type", ["jetmoe", "llama4_text", "longcat_flash"])
def test_experts_of_another_kind_are_refused(model_type):
    assert families()[model_type] == OWN_KIND
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(tiny_config(model_type))
    with pytest.raises(StoreError, match=r"experts served by|MoE layers"):
        offloadable_blocks(model)


def recorded(local, *, scores=True):
    """Experts of each token and layer, and the logits of every pass, [passes, B, V]."""
    recorder = GateRecorder(local, scores=scores, predictions=scores, residual=None)
    logits = []
    hook = local.model.register_forward_hook(
        lambda _model, _args, out: logits.append(out.logits[:, -1].float())
    )
    with recorder.open(PROMPTS, NEW):
        generate(local, PROMPTS, NEW, recorder.note)
    hook.remove()
    rows = [recorder.rows(row, len(prompt)) for row, prompt in enumerate(PROMPTS)]
    experts = [
        (int(layer), *sorted(experts.tolist()))
        for row in rows
        for layer, experts in zip(row["layer"], row["experts"], strict=True)
    ]
    return experts, torch.stack(logits)
