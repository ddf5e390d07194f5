"""Texts of errors that refuse a step."""

ALONE = (
    "optimizer.step(): the model is a stage of a pipeline (torch.distributed.pipelining), and "
    "would decide alone, without the gradients and losses of other stages: on every rank give the "
    "schedule loss_fn=amp.pipeline_loss(loss_fn)"
)


def no_backward(with_grad: int) -> str:
    """Return the text for a step on ``with_grad`` gradients that no scaled loss has left."""
    return (
        f"optimizer.step(): {with_grad} parameter(s) have gradients, but no amp.backward(loss) fed "
        "this optimizer since its last step: amp.backward(loss, other) feeds the named one alone. "
        "This level scales the loss, so gradients of a plain "
        "loss.backward() are wrong: clear them, optimizer.zero_grad(), and call "
        "amp.backward(loss), or scaled.backward() in `with amp.scale_loss(loss, optimizer) as "
        "scaled:`, or amp.scaler.scale(loss).backward(); call step() once per backward. Replays of "
        "a CUDA graph that has captured amp.backward(loss) go "
        "unseen: capture step() with it, or capture amp.scaler.scale(loss).backward() in its place"
    )


def sparse_gradients(asked: str, leave_out: str) -> str:
    """Return the text for sparse gradients, on which only torch's own step would work.

    Args:
        asked: options of ``enable`` that need a fused step.
        leave_out: names of these options.
    """
    return (
        f"{asked}: expected dense gradients, got sparse ones, on which torch's own step would "
        f"work: use nn.Embedding(sparse=False), or leave {leave_out} out"
    )
