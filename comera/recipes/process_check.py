"""Check which runs several processes can train, and how."""

from comera.recipes.run_config import RunConfig


def check_processes(config: RunConfig, count: int) -> None:
    """Raise ``ValueError`` where so many processes cannot train a run."""
    size, device = config.train.batch_size, config.device
    if config.parallel.kind != "ddp":
        _check_shared(config)
    parts = 1 if config.parallel.kind == "tensor" else count  # of the batch
    if size % parts:
        raise ValueError(
            f"train.batch_size={size} is that of all processes together, and {count} processes "
            f"cannot have equal parts of it: give {size // count * count or count} or "
            f"{(size // count + 1) * count}"
        )
    if config.train.accumulate > size // parts:
        raise ValueError(
            f"train.accumulate={config.train.accumulate} splits a batch into more parts than the "
            f"{size // parts} rows that each of {count} processes has of it"
        )
    if count > 1 and ":" in device:
        raise ValueError(
            f"device={device!r} is one GPU for {count} processes: give device=cuda, and each takes "
            "one of its own"
        )


_OF_SHARDS = ("adamw", "muon", "sgd")
"""Optimizers that step a part of a matrix as they step the whole one."""


def _check_shared(config: RunConfig) -> None:
    """Check that a run can train a model whose dense matrices are shared out or split."""
    kind = f"parallel.kind={config.parallel.kind}"
    way_out = "or keep the model whole in every process: parallel.kind=ddp"
    if config.parallel.kind == "tensor" and config.causal_text is None:
        raise ValueError(
            f"{kind} splits the products of the model of causal_text, and this run has another: "
            f"give parallel.kind=fsdp, {way_out}"
        )
    optimizer = config.optimizer_for(config.train.steps)
    if optimizer.name not in _OF_SHARDS:
        raise ValueError(
            f"optimizer.name={optimizer.name} needs whole matrices, which {kind} does "
            f"not leave: give one of {', '.join(_OF_SHARDS)}, {way_out}"
        )
    if optimizer.target_modules is not None:
        raise ValueError(
            f"optimizer.target_modules={optimizer.target_modules!r} has muon step dense matrices, "
            f"which it needs whole, and {kind} does not leave them so: leave it out, {way_out}"
        )
    if optimizer.in_backward:
        raise ValueError(
            "optimizer.in_backward=true would step before gradients are averaged under "
            f"{kind}: leave it out, {way_out}"
        )
    if config.train.compile:
        raise ValueError(
            f"train.compile=true has not been tried under {kind}: leave it out, {way_out}"
        )
