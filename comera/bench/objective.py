"""What the rank objective adds to a training step."""

import torch

from comera.bench.encoders import Encoders, learned_ranks, loss_of_rows, train_step
from comera.bench.numerics import compare_model
from comera.bench.session import Session


def objective(session: Session, encoders: Encoders, batch: int) -> None:
    """The objective alone, forward and backward, against the whole step without it."""
    model, data = encoders.model("comera", session.device), encoders.batch(batch, session.device)
    session.check(compare_model(f"{encoders}, batch {batch}", model, loss_of_rows, data))
    step = train_step(model)
    loss = torch.ones((), requires_grad=True, device=session.device)
    for stage in ("early", "late"):
        ranks = learned_ranks(model, early=stage == "early")

        def alone(ranks=ranks) -> None:
            ranks.objective(loss * 1).backward()
            ranks.step(loss.detach())
            step.optimizer.zero_grad()

        title = f"{encoders}, {batch} sequences of {encoders.length} tokens, {stage} stage"
        timings = session.measure(title, {"step": lambda: step(data), "objective": alone}, "step")
        session.note(f"{stage} stage: the objective adds {100 / timings.ratio('objective'):.2f} %")
