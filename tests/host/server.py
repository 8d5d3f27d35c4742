"""A real ComfyUI server on the CPU, in a folder of its own, with this checkout as a custom node."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120
RUN_SECONDS = 120


class Server:
    """Started on construction; `stop` ends it. `folder` is its base directory."""

    def __init__(self, comfyui: Path, folder: Path) -> None:
        self.folder = folder
        for name in ("custom_nodes", "models/diffusion_models", "output", "input", "user"):
            (folder / name).mkdir(parents=True)
        (folder / "custom_nodes" / "ComfyUI-LeanDiT").symlink_to(ROOT, target_is_directory=True)
        shutil.copytree(ROOT / "tests/host/fixture_pack", folder / "custom_nodes/fixture_pack")
        settings = folder / "user/default/comfy.settings.json"
        settings.parent.mkdir()
        settings.write_text(json.dumps({"Comfy.TutorialCompleted": True}))
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = folder / "server.log"
        with self.log.open("w") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "main.py", "--cpu", "--port", str(self.port)),
                    *("--base-directory", str(folder), "--disable-api-nodes"),
                ],
                cwd=comfyui,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")},
            )
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            try:
                self.get("/system_stats")
                return
            except (urllib.error.URLError, ConnectionError):
                if self._process.poll() is not None:
                    break
                time.sleep(0.3)
        self.stop()
        raise RuntimeError(f"ComfyUI did not start:\n{self.log.read_text()[-3000:]}")

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.address + path, timeout=30) as reply:
            return json.load(reply)

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        request = urllib.request.Request(
            self.address + path,
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return reply.status, json.load(reply)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def run(self, prompt: dict[str, Any]) -> dict[str, Any]:
        """Run an API prompt to its end and return its history entry."""
        status, reply = self.post("/prompt", {"prompt": prompt})
        if status != 200:
            raise RuntimeError(json.dumps(reply))
        deadline = time.monotonic() + RUN_SECONDS
        while time.monotonic() < deadline:
            history = self.get(f"/history/{reply['prompt_id']}")
            if history:
                return history[reply["prompt_id"]]
            time.sleep(0.2)
        raise RuntimeError(f"the prompt did not end:\n{self.log.read_text()[-3000:]}")
