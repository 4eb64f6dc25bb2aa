"""`moesim model`: what a model file holds, layer by layer."""

import json

from moesim.cli.commands.advice.advise import Model, Quant
from moesim.cli.options import AsJson


def model(model: Model, quant: Quant = "", as_json: AsJson = False) -> None:
    """Print what a model file holds: bytes by layer, experts, weight formats.

    \b
    Examples:
      moesim model model.gguf
      moesim model qwen3-30b-a3b --quant Q8_0 --json
    """
    from moesim.advice.model.resolve import model_contents
    from moesim.advice.report.as_json import model_json
    from moesim.advice.report.text import model_text

    contents = model_contents(model, quant)
    print(
        json.dumps(model_json(contents), indent=2) if as_json else model_text(contents)
    )
