"""Settings of a training run: data, optimizer, checkpoints, evaluation, target."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

_FROZEN = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class DataConfig(BaseModel):
    """Where tokens come from."""

    model_config = _FROZEN

    dataset_type: Literal["embedded", "text", "jsonl", "synthetic"] = Field(
        "embedded", description="embedded: this Python's standard library's source, as bytes"
    )
    dataset_path: str = Field("", description="text, jsonl: a file, a folder or a glob")
    jsonl_text_key: str = Field("text", description="jsonl: the field that holds the text")
    tokenizer_path: str = Field(
        "", description="a tokenizer.json, or the folder that has one; empty: bytes are tokens"
    )
    eval_fraction: float = Field(0.05, gt=0, lt=1, description="of the documents, held out")
    data_shuffle_seed: int = Field(0, description="seed of the documents' order")


class OptimizerConfig(BaseModel):
    """AdamW with a linear warm-up and a cosine, and clipping by global norm."""

    model_config = _FROZEN

    learning_rate: float = Field(1e-3, gt=0, description="the peak, after the warm-up")
    learning_rate_schedule_steps: int = Field(-1, description="-1: as many as steps")
    warmup_steps_fraction: float = Field(0.1, ge=0, le=1, description="of the schedule's steps")
    cosine_learning_rate_final_fraction: float = Field(
        0.1, ge=0, le=1, description="of the peak, where the cosine ends"
    )
    adam_b1: float = Field(0.9, ge=0, lt=1, description="decay of the gradients' mean")
    adam_b2: float = Field(0.95, ge=0, lt=1, description="decay of the squared gradients' mean")
    adam_eps: float = Field(1e-8, gt=0, description="added to the root of the second mean")
    adam_weight_decay: float = Field(0.1, ge=0, description="decoupled, times the learning rate")
    gradient_clipping_threshold: float = Field(1.0, ge=0, description="global norm; 0: no clipping")
    gradient_accumulation_steps: int = Field(1, ge=1, description="batches summed before a step")


class HostsConfig(BaseModel):
    """The processes of one run; where a launcher started them, they find each other."""

    model_config = _FROZEN

    coordinator_address: str = Field("", description="HOST:PORT of process 0")
    num_processes: int = Field(0, ge=0, description="processes of the run; 0: as launched")
    process_id: int = Field(-1, ge=-1, description="which of them this is; -1: as launched")
    jax_distributed_initialization_timeout: int = Field(
        300, ge=1, description="seconds to wait for the other processes"
    )
    skip_jax_distributed_system: bool = Field(
        False, description="run as one process, whatever the environment says"
    )


class LaunchConfig(BaseModel):
    """What is said of one launch of a run."""

    model_config = _FROZEN

    resume_with_changes: bool = Field(
        False, description="go on with a run although settings that change its numbers differ"
    )


class TargetConfig(BaseModel):
    """The TPUs that `octablox compile` compiles for."""

    model_config = _FROZEN

    compile_topology: str = Field(
        "", description="such as tpu7x:4x4x8, chips along each axis of a slice; or v5e-256"
    )
    compile_topology_num_slices: int = Field(1, description="slices of that topology; -1: 1")


class RunConfig(BaseModel):
    """One run: its length, its batches, its folder, and what it reports when."""

    model_config = _FROZEN

    run_name: str = Field("", description="the run's folder; empty: made from the date")
    base_output_directory: str = Field("runs", description="where the run folders are")
    steps: int = Field(100, ge=1, description="optimizer steps of the whole run")
    per_device_batch_size: float = Field(
        1.0, gt=0, description="sequences a device, in each accumulation step"
    )
    max_target_length: int = Field(256, ge=2, description="tokens of a sequence")
    init_weights_seed: int = Field(0, description="seed of the initial parameters")
    load_parameters_path: str = Field(
        "", description="start from the parameters of this folder: a converted one, or a run's"
    )
    log_period: int = Field(10, ge=1, description="steps between log lines")
    eval_interval: int = Field(100, ge=-1, description="steps between evals; -1: the end only")
    eval_steps: int = Field(8, ge=1, description="batches of one evaluation")
    enable_checkpointing: bool = Field(True, description="save, so that the run can be resumed")
    checkpoint_period: int = Field(100, ge=1, description="steps between checkpoints")
    max_num_checkpoints_to_keep: int = Field(2, ge=1, description="older ones are deleted")
    checkpoint_keep_period: int = Field(
        0, ge=0, description="checkpoints of steps that are multiples of this stay; 0: none"
    )
    enable_tensorboard: bool = Field(True, description="write TensorBoard events too")
    jax_cache_dir: str = Field(
        "~/.cache/octablox", description="keeps compiled programs between runs; empty: nowhere"
    )
