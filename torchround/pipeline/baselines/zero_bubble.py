"""Zero-bubble schedules (Qi et al., 2023): the weights' gradients are tasks that fill what would be bubbles.

f, b, w: a stage's forward, input gradient and weight gradient; p devices.
"""

from torchround.pipeline.baselines.bound import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENT,
    Action,
    Setting,
    bound_stages,
    bound_tasks,
)
from torchround.pipeline.baselines.flush import flushed
from torchround.pipeline.baselines.measure import Schedule
from torchround.pipeline.timeline import Task


def zb_h1(setting: Setting) -> Schedule:
    """1F1B's memory, bubble `(p - 1)(f + b - w)`: device i puts off its weight gradients by i micro-batches."""
    p = setting.num_devices
    orders = [_order(setting, device, warm_up=p - device, delay=device) for device in range(p)]
    return flushed("zb_h1", setting, bound_stages(setting, 1), orders)


def zb_h2(setting: Setting) -> Schedule:
    """2p - 1 micro-batches in flight, bubble `(p - 1)(f + b - 2w)`, 0 if all are equal.

    That holds from step to step: the paper checks the update afterwards instead of waiting for all devices,
    so each device goes on to the next step when its own stage is done.
    """
    p, m = setting.num_devices, setting.num_micro_batches
    stages = bound_stages(setting, 1)
    orders = [_order(setting, device, 2 * (p - device) - 1, 2 * device) for device in range(p)]

    def tasks(steps: int) -> list[Task]:
        repeated = [
            [Action(a.kind, a.stage, a.micro_batch + step * m) for step in range(steps) for a in order]
            for order in orders
        ]
        return bound_tasks(setting, stages, repeated)

    partition = [len(stage.layers) for stage in stages]
    return Schedule("zb_h2", p, partition, tasks, continuous=True, tail_steps=1 + 2 * p // m)


def _order(setting: Setting, device: int, warm_up: int, delay: int) -> list[Action]:
    """`warm_up` forwards, then backward, weight gradient of `delay` micro-batches ago, forward; at the end
    backwards and the weight gradients that were put off in turn."""
    m = setting.num_micro_batches
    order = [Action(FORWARD, device, k) for k in range(min(warm_up, m))]
    pending = 0
    for k in range(m):
        order.append(Action(BACKWARD, device, k))
        if k - pending >= delay or warm_up + k >= m:
            order.append(Action(WEIGHT_GRADIENT, device, pending))
            pending += 1
        if warm_up + k < m:
            order.append(Action(FORWARD, device, warm_up + k))
    order += [Action(WEIGHT_GRADIENT, device, k) for k in range(pending, m)]
    return order
