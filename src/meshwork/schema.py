"""The keys of a config: a dataclass for each group, and what their values may be.

conf/train.yaml holds the defaults and says what each key means; this page holds the types. A new
key is a field here and a line there.
"""

from dataclasses import dataclass
from typing import Any, Optional, Union


@dataclass
class Run:
    id: Optional[str]
    name: Optional[str]
    dir: Optional[str]
    reopen: Optional[str]
    root: str
    group: Optional[str]
    tags: list[str]
    notes: Optional[str]


@dataclass
class Runtime:
    device: str
    timeout_s: float
    step_timeout_s: float


@dataclass
class Model:
    _target_: str
    name: str
    pretrained: bool
    checkpoint_path: Optional[str]
    num_classes: Optional[int]
    in_chans: Optional[int]
    img_size: Optional[int]
    drop_rate: float
    drop_path_rate: float
    freeze: list[str]
    args: dict[str, Any]


@dataclass
class Augment:
    scale: Optional[list[float]]
    ratio: list[float]
    hflip: float
    shift: int
    color_jitter: Optional[float]
    auto_augment: Optional[str]
    re_prob: float


@dataclass
class Data:
    _target_: str
    root: Optional[str]
    image_size: int
    num_samples: Optional[int]
    val_samples: Optional[int]
    val_fraction: Optional[float]
    predict_root: Optional[str]
    workers: int
    drop_last: bool
    on_bad_image: str
    max_bad_images: int
    augment: Augment
    args: dict[str, Any]


@dataclass
class Task:
    _target_: str
    label_smoothing: float
    criterion: Optional[dict[str, Any]]
    args: dict[str, Any]


@dataclass
class Optimizer:
    _target_: str
    name: Optional[str]
    lr: float
    weight_decay: float
    layer_decay: Optional[float]
    args: dict[str, Any]


@dataclass
class Scheduler:
    _target_: str
    warmup_steps: Optional[int]
    warmup_epochs: Optional[float]
    milestones: list[float]
    args: dict[str, Any]


@dataclass
class Trainer:
    max_epochs: Optional[int]
    max_steps: Optional[int]
    stop_at_step: Optional[int]
    global_batch_size: int
    micro_batch_size: Optional[int]
    precision: str
    matmul_precision: str
    deterministic: bool
    clip_grad_norm: Optional[float]
    ema_decay: Optional[float]
    early_stop: Optional[int]
    log_every_n_steps: int
    val_every_n_epochs: Optional[int]
    val_every_n_steps: Optional[int]
    overfit_one_batch: bool
    profile: bool
    detect_anomaly: bool


@dataclass
class Parallel:
    dp_replicate: int
    dp_shard: int
    tp: int
    pp: int
    schedule: str
    stages: Optional[list[str]]
    reshard_after_forward: Optional[bool]
    activation_checkpointing: str
    compile: bool
    param_dtype: str
    find_unused_parameters: bool


@dataclass
class Checkpoint:
    resume: str
    every_n_epochs: Optional[int]
    every_n_steps: Optional[int]
    keep: int
    async_save: bool
    on_full_disk: str


@dataclass
class Logger:
    _target_: Optional[str]
    mode: str
    project: str
    entity: Optional[str]
    timeout_s: float
    args: dict[str, Any]


@dataclass
class Objective:
    metric: Optional[str]
    mode: Optional[str]


@dataclass
class Config:
    mode: str
    seed: int
    dry_run: Union[bool, int]
    run: Run
    runtime: Runtime
    model: Model
    data: Data
    task: Task
    optimizer: Optimizer
    scheduler: Scheduler
    trainer: Trainer
    parallel: Parallel
    checkpoint: Checkpoint
    logger: Logger
    objective: Objective


# Text keys whose value is a path: taken as typed, then made absolute from where the command was
# typed. The words beside a key are no paths.
PATHS: dict[str, tuple[str, ...]] = {
    "run.dir": (),
    "run.reopen": (),
    "run.root": (),
    "model.checkpoint_path": (),
    "data.root": (),
    "data.predict_root": (),
    "checkpoint.resume": ("auto", "never", "best"),
}

# Keys below which any further key may be typed.
OPEN = (
    "model.args",
    "data.args",
    "task.args",
    "task.criterion",
    "optimizer.args",
    "scheduler.args",
    "logger.args",
)

CHOICES = {
    "mode": ("train", "validate", "test", "predict"),
    "runtime.device": ("auto", "cpu", "cuda", "mps"),
    "data.on_bad_image": ("raise", "skip"),
    "trainer.precision": ("fp32", "bf16", "fp16", "fp64"),
    "trainer.matmul_precision": ("highest", "high", "medium"),
    "checkpoint.on_full_disk": ("stop", "continue"),
    "parallel.schedule": (
        "GPipe",
        "1F1B",
        "Interleaved1F1B",
        "InterleavedZeroBubble",
        "ZBVZeroBubble",
    ),
    "parallel.activation_checkpointing": ("none", "full"),
    "parallel.param_dtype": ("fp32", "bf16"),
    "logger.mode": ("auto", "online", "offline", "disabled"),
    "objective.mode": ("max", "min"),
}

# key -> (smallest, largest) number that makes sense, for each number of a list; None leaves that
# end open. A number with a range is also finite.
RANGES: dict[str, tuple[float, float | None]] = {
    "seed": (0, 2**63 - 1),
    "runtime.timeout_s": (0.1, None),
    "runtime.step_timeout_s": (0.1, None),
    "model.num_classes": (1, None),
    "model.in_chans": (1, None),
    "model.img_size": (1, None),
    "model.drop_rate": (0, 0.999),
    "model.drop_path_rate": (0, 0.999),
    "data.image_size": (1, None),
    "data.num_samples": (1, None),
    "data.val_samples": (1, None),
    "data.val_fraction": (0.001, 0.999),
    "data.workers": (0, None),
    "data.max_bad_images": (0, None),
    "data.augment.scale": (1e-6, 1),
    "data.augment.ratio": (1e-6, None),
    "data.augment.hflip": (0, 1),
    "data.augment.shift": (0, None),
    "data.augment.color_jitter": (0, None),
    "data.augment.re_prob": (0, 1),
    "task.label_smoothing": (0, 0.999),
    "optimizer.lr": (0, None),
    "optimizer.weight_decay": (0, None),
    "optimizer.layer_decay": (0.001, 1),
    "scheduler.warmup_steps": (0, None),
    "scheduler.warmup_epochs": (0, None),
    "scheduler.milestones": (0, None),
    "trainer.max_epochs": (1, None),
    "trainer.max_steps": (1, None),
    "trainer.stop_at_step": (1, None),
    "trainer.global_batch_size": (1, None),
    "trainer.micro_batch_size": (1, None),
    "trainer.clip_grad_norm": (1e-12, None),
    "trainer.ema_decay": (0, 0.999999),
    "trainer.early_stop": (1, None),
    "trainer.log_every_n_steps": (1, None),
    "trainer.val_every_n_epochs": (1, None),
    "trainer.val_every_n_steps": (1, None),
    "checkpoint.every_n_epochs": (1, None),
    "checkpoint.every_n_steps": (1, None),
    "checkpoint.keep": (1, None),
    "logger.timeout_s": (0.1, None),
}
