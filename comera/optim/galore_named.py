"""GaLore around the optimizers that people use it with, under the names they know."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from comera.optim.galore import GaLore


class GaLoreAdamW(GaLore):
    """:class:`GaLore` around :class:`torch.optim.AdamW`; arguments as there."""

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, **settings: Any) -> None:
        super().__init__(params, torch.optim.AdamW, lr=lr, **settings)


class GaLoreAdafactor(GaLore):
    """:class:`GaLore` around :class:`torch.optim.Adafactor`; arguments as there, but for ``eps``.

    Adafactor's steps are relative to the size of the parameter, here to that of the whole one.
    Torch's own ``eps`` keeps no scale for gradients below 1e-5; this one is that of the paper.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        eps: tuple[float | None, float] = (1e-15, 1e-3),
        **more: Any,
    ) -> None:
        super().__init__(params, torch.optim.Adafactor, lr=lr, eps=eps, **more)


class GaLoreAdamW8bit(GaLore):
    """:class:`GaLore` around torchao's ``AdamW8bit``; arguments as there.

    Raises:
        ImportError: If torchao is not installed.
    """

    def __init__(self, params: Iterable[Any], lr: float | Tensor = 1e-3, **settings: Any) -> None:
        try:
            from torchao.optim import AdamW8bit
        except ImportError:
            raise ImportError(
                "GaLoreAdamW8bit needs torchao: pip install torchao; or give GaLore another 8-bit "
                "optimizer as inner="
            ) from None
        super().__init__(params, AdamW8bit, lr=lr, **settings)
