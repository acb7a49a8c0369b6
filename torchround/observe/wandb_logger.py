"""The reporter that logs a run to Weights & Biases, over the network or into a folder."""

import logging
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from torchround.observe.record import StepRecord

logger = logging.getLogger(__name__)

# Seconds to wait for the server of Weights & Biases to answer a connection, and for the library to start a run there.
_CONNECT_S, _WANDB_START_S = 5.0, 30.0


class WandbLogger:
    """One run of Weights & Biases. `run_id` goes into checkpoints; a resumed run passes it in to join the same run.

    `offline` writes to `folder/wandb` and needs no network and no account. Each part of a resumed run is a
    folder of its own there with the same id, and `wandb sync --append` joins them. `online` falls back to
    `offline`, with one warning, if the service cannot be reached or does not take the run. Every method
    raises whatever the library raises.
    """

    def __init__(
        self,
        mode: Literal["online", "offline"],
        project: str,
        name: str,
        folder: Path,
        config: Mapping[str, Any],
        run_id: str | None = None,
    ) -> None:
        import wandb  # here, so that a run without it never pays for the import

        folder.mkdir(parents=True, exist_ok=True)

        def start(mode: Literal["online", "offline"]) -> Any:
            return wandb.init(
                mode=mode,
                project=project,
                name=name,
                dir=str(folder),
                config=dict(config),
                id=run_id,
                # Offline there is no server to look the id up on, and the library would warn.
                resume="allow" if run_id is not None and mode == "online" else None,
                # Otherwise the library would put itself between our console lines and standard output.
                # And it would end a run with dozens of lines, curves and last values of each device among them.
                settings=wandb.Settings(
                    console="off",
                    init_timeout=_WANDB_START_S,
                    max_end_of_run_history_metrics=0,
                    max_end_of_run_summary_metrics=0,
                ),
            )

        if mode == "online":
            try:
                # The library itself tries for a minute and a half before it says that there is no network.
                connect(str(wandb.setup().settings.base_url))
                self._run = start("online")
            except Exception as error:  # noqa: BLE001  (without a page the figures are still wanted)
                reason = f"{type(error).__name__}: {error}"
                text = "Weights & Biases does not take this run (%s), so it is logged offline to %s; `wandb sync` sends it"
                logger.warning(text, reason, folder / "wandb")
                mode = "offline"
        if mode == "offline":
            self._run = start("offline")
        # The library drops records of a step that it has seen, but after a resume the steps since the last
        # checkpoint come again. As a metric of its own, `step` is only an axis.
        self._run.define_metric("*", step_metric="step")
        self.run_id = str(self._run.id)

    def log(self, record: StepRecord) -> None:
        """Hand the record to the library, which sends it from its own process.

        Each device's figure is a curve of its own, such as `engine/busy_s/0`. The continuations of a step are a table.
        """
        values: dict[str, Any] = dict(_curves("", record.as_dict()))
        if record.samples:
            from wandb import Table

            rows = [[record.step, sample.prompt, sample.text] for sample in record.samples]
            values["samples"] = Table(["step", "prompt", "text"], rows)
        self._run.log(values)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


def connect(url: str) -> None:
    """Connect to the server of a URL, or to the proxy in front of it, and hang up. Raises `OSError` within seconds."""
    parts = urlsplit(url)
    proxy = None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
    if proxy is not None:
        parts = urlsplit(proxy if "//" in proxy else f"//{proxy}")
    port = parts.port or (443 if parts.scheme == "https" else 80)
    socket.create_connection((parts.hostname or "", port), timeout=_CONNECT_S).close()


def _curves(name: str, value: Any) -> Iterator[tuple[str, float]]:
    """Yield single numbers by path, because the library draws neither lists nor objects."""
    if isinstance(value, (Mapping, tuple)):
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in parts:
            yield from _curves(f"{name}/{key}" if name else str(key), part)
    elif isinstance(value, (int, float)):
        yield name, value
