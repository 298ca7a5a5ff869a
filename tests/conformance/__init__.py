"""What torch's own tests ask of modules and optimizers, asked of ours; torch's are the controls."""

import re
import sys
import unittest
from types import ModuleType, SimpleNamespace

import pytest
import torch

# Imported by the harness and not needed: a package, and a table of all operators that takes seconds
_STUBS = {
    "expecttest": {"TestCase": unittest.TestCase},
    "torch.testing._internal.common_methods_invocations": {"DecorateInfo": lambda *_, **__: None},
}


def harness() -> SimpleNamespace:
    """Import the harness that torch ships, and undo what that does to the process."""
    script = torch._C.ScriptFunction, torch._C.ScriptMethod
    calls = [kind.__call__ for kind in script]
    stubs = {name: ModuleType(name) for name in _STUBS.keys() - sys.modules.keys()}
    for name, module in stubs.items():
        vars(module).update(_STUBS[name])
    sys.modules.update(stubs)
    from torch.testing._internal import common_modules, common_optimizers

    for name in stubs:
        del sys.modules[name]
    vars(torch.backends)["__allow_nonbracketed_mutation_flag"] = True
    for kind, call in zip(script, calls, strict=True):
        kind.__call__ = call
    return SimpleNamespace(**vars(common_optimizers) | vars(common_modules))


def table(names, requirements, slow=(), fast=None):
    """Return the parameters of a test: every row (all but ``fast`` are slow) and requirement."""
    pairs = [(name, each) for name in names for each in requirements]
    fast = names if fast is None else fast
    marks = [[pytest.mark.slow] if each in slow or name not in fast else [] for name, each in pairs]
    ids = [f"{name}: {each.__name__}" for name, each in pairs]
    rows = [pytest.param(*pair, marks=each) for pair, each in zip(pairs, marks, strict=True)]
    return pytest.mark.parametrize(("name", "requirement"), rows, ids=ids)


def conforms(name, requirement, cannot) -> None:
    """Run a requirement; one that ``cannot`` be fulfilled must fail with the error listed there."""
    errors = (e for names, what, e, _ in cannot if what is requirement and re.match(names, name))
    error = next(errors, None)
    if error is None:
        requirement(name)
        return
    with pytest.raises(Exception, match=error):
        requirement(name)
