"""What `advise` refuses: one line with the place, what was expected and a way out."""


class AdviceError(ValueError):
    """A model file, machine, measurement or job that cannot be advised on."""
