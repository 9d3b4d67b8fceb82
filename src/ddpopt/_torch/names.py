"""Every private name of torch that ddpopt touches, a row each; the other modules here use the rows.

Private is what torch does not document: what has an underscore in its name or in its module's, and
attributes of DDP and Dynamo that users are not told of. A row is looked up when it is used, to be
written as to be read: a release that moved it raises `TorchDriftError` there, the backend reports
that as `Fallback.TORCH_DRIFT`, and training goes on unsplit. See tests/system/test_drift.py.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ddpopt.errors import TorchDriftError

Release = tuple[int, int]
FIRST: Release = (2, 11)
LAST: Release = (2, 15)


class Need(enum.Enum):
    """What a name is for, and so what is lost without it."""

    SPLIT = "splitting graphs under DDP"
    WHOLE = "getting whole graphs from Dynamo"
    BACKWARD = "split='backward'"
    GUARD = "compiling anew, and forgetting code, where buckets differ"
    WATCH = "telling when a DDP forward begins and ends"
    CHECKPOINT = "telling which code a checkpoint's recomputation has to run"
    ERRORS = "telling Dynamo's own exceptions from errors"
    REBUCKET = "rebucket and buckets='auto'"
    RECORD = "record and buckets='auto'"
    ESTIMATE = "estimate and plan"
    COPY = "verify and warmup, which step on a copy"
    ALGORITHMS = "communication algorithms"
    REPLICAS = "DataParallel"
    STORE = "ranks meeting by the process group's store"
    LOGS = "TORCH_LOGS=ddp_graphs"
    TRACE = "payloads for tlparse"


@dataclass(frozen=True, slots=True)
class PrivateName:
    """A name, its owner (a module, or what people call the kind of object), and its releases."""

    owner: str
    name: str
    need: Need
    since: Release = FIRST
    until: Release = LAST

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}"

    @property
    def is_expected(self) -> bool:
        """Whether the installed release should have it; the unknown ones after the last should."""
        release = installed_release()
        return self.since <= release and (self.until == LAST or release <= self.until)

    def drift(self) -> TorchDriftError:
        """Return what is raised where a release that should have this name has not."""
        return TorchDriftError(
            f"torch {torch.__version__} has no {self}, which ddpopt needs; "
            f"ddpopt was tested with torch {tested_range()}"
        )


class ModuleName(PrivateName):
    """An attribute of a module of torch's."""

    __slots__ = ()

    def get(self) -> Any:
        """Return it, or raise TorchDriftError."""
        try:
            return _read(self, sys.modules.get(self.owner) or importlib.import_module(self.owner))
        except (ImportError, AttributeError) as error:
            raise self.drift() from error

    def set(self, value: Any) -> None:
        """Put another value in its place, or raise TorchDriftError."""
        try:
            _write(self, importlib.import_module(self.owner), value)
        except (ImportError, AttributeError) as error:
            raise self.drift() from error

    @contextlib.contextmanager
    def replaced_by(self, value: Any) -> Iterator[None]:
        """Put another value in its place in this block."""
        original = self.get()
        self.set(value)
        try:
            yield
        finally:
            self.set(original)


class ObjectName(PrivateName):
    """An attribute of an object or a class of torch's."""

    __slots__ = ()

    def of(self, owner: Any) -> Any:
        """Return it, or raise TorchDriftError."""
        try:
            return _read(self, owner)
        except AttributeError as error:
            raise self.drift() from error

    def find(self, owner: Any, default: Any = None) -> Any:
        """Return it; the default where `owner` is another kind of object, or has not got it."""
        try:
            return _read(self, owner)
        except AttributeError:
            return default

    def is_in(self, owner: Any) -> bool:
        """Whether `owner` has it."""
        return self.find(owner, _read) is not _read

    def set(self, owner: Any, value: Any) -> None:
        """Give an attribute that is there another value, or raise TorchDriftError."""
        try:
            _write(self, owner, value)
        except AttributeError as error:
            raise self.drift() from error

    def mark(self, own: Any, value: Any) -> None:
        """Give an object of ours what torch looks for on such objects, there or not."""
        setattr(own, self.name, value)


@contextlib.contextmanager
def settings(values: Mapping[ModuleName, Any]) -> Iterator[None]:
    """Give settings of torch's `config` modules these values in this block.

    Raises:
        TorchDriftError: there is no such setting.
    """
    with contextlib.ExitStack() as stack:
        for row, value in values.items():
            row.get()
            config: Any = importlib.import_module(row.owner)
            stack.enter_context(config.patch({row.name: value}))
        yield


# All look-ups and writes go through these two, where tests hide names.


def _read(row: PrivateName, owner: Any) -> Any:
    return getattr(owner, row.name)


def _write(row: PrivateName, owner: Any, value: Any) -> None:
    getattr(owner, row.name)  # raises where it is missing, since writing would create it
    setattr(owner, row.name, value)


# ---- Dynamo ------------------------------------------------------------------------------------

_DYNAMO, _GUARDS = "torch._dynamo", "torch._guards"
_DYNAMO_CONFIG, _EXC = f"{_DYNAMO}.config", f"{_DYNAMO}.exc"

DDP_OPTIMIZER = ModuleName(f"{_DYNAMO}.backends.distributed", "DDPOptimizer", Need.WHOLE)
ORIG_BACKEND = ObjectName("frame callback", "_torchdynamo_orig_backend", Need.WHOLE)
COMPILER_FN = ObjectName("torch.compile's wrapper", "compiler_fn", Need.WHOLE)
BACKEND_OPTIONS = ObjectName("torch.compile's wrapper", "kwargs", Need.COPY)
LOOKUP_BACKEND = ModuleName(f"{_DYNAMO}.backends.registry", "lookup_backend", Need.SPLIT)
TRACE_RULES_CHECK = ModuleName(f"{_DYNAMO}.trace_rules", "check", Need.WATCH)
GET_OPTIMIZE_DDP_MODE = ModuleName(f"{_DYNAMO}.utils", "get_optimize_ddp_mode", Need.SPLIT)
AUTOGRAD_ENABLED = ModuleName(
    f"{_DYNAMO}.compiled_autograd", "compiled_autograd_enabled", Need.SPLIT
)
COMPILED_AUTOGRAD = ModuleName(_DYNAMO_CONFIG, "compiled_autograd", Need.SPLIT)
SUPPRESS_ERRORS = ModuleName(_DYNAMO_CONFIG, "suppress_errors", Need.SPLIT)
SKIP_FRAME = ModuleName(_EXC, "SkipFrame", Need.ERRORS)
RESTART_ANALYSIS = ModuleName(_EXC, "RestartAnalysis", Need.ERRORS)
RESTART_FOR_FLOATS = ModuleName(_EXC, "TensorifyScalarRestartAnalysis", Need.ERRORS)
UNSUPPORTED = ModuleName(_EXC, "Unsupported", Need.ERRORS)
ALLOWED_FALLBACKS = ModuleName(
    f"{_DYNAMO}.output_graph", "exceptions_allowed_to_be_fallback", Need.ERRORS
)
OPTIMIZE_DDP = ModuleName(_DYNAMO_CONFIG, "optimize_ddp", Need.SPLIT)
RECOMPILE_LIMIT = ModuleName(_DYNAMO_CONFIG, "recompile_limit", Need.REPLICAS)
SKIP_HOOK_GUARDS = ModuleName(_DYNAMO_CONFIG, "skip_nnmodule_hook_guards", Need.REPLICAS)
ERROR_ON_FX_TRACE = ModuleName(_DYNAMO_CONFIG, "error_on_nested_fx_trace", Need.ESTIMATE)

TRACING_CONTEXT = ModuleName(_GUARDS, "TracingContext", Need.SPLIT)
TRACING = ModuleName(_GUARDS, "tracing", Need.SPLIT)
DETECT_FAKE_MODE = ModuleName(_GUARDS, "detect_fake_mode", Need.SPLIT)
GUARD = ModuleName(_GUARDS, "Guard", Need.GUARD)
GLOBAL_STATE_SOURCE = ModuleName(f"{_DYNAMO}.source", "GlobalStateSource", Need.GUARD)
GUARDS_CONTEXT = ObjectName("TracingContext", "guards_context", Need.GUARD)
DYNAMO_GUARDS = ObjectName("GuardsContext", "dynamo_guards", Need.GUARD)
GUARD_ROOT = ObjectName("GuardManagerWrapper", "root", Need.GUARD)
BUILT_GUARDS = ObjectName("GuardBuilder", "guard_manager", Need.GUARD)
CHECK_FN_MANAGER = ObjectName("GuardBuilder", "check_fn_manager", Need.GUARD)
INVALIDATE = ObjectName("CheckFunctionManager", "invalidate", Need.GUARD)
GUARD_MANAGER = ObjectName("CheckFunctionManager", "guard_manager", Need.GUARD)
ID_MATCHED_OBJS = ObjectName("GuardManagerWrapper", "id_matched_objs", Need.GUARD)
FRAME_CALLBACK = ModuleName("torch._C._dynamo.eval_frame", "get_eval_frame_callback", Need.WATCH)

OPTIMIZE = ModuleName(_DYNAMO, "optimize", Need.COPY)
OPTIMIZED_MODULE = ModuleName(_DYNAMO, "OptimizedModule", Need.COPY)
ORIG_MOD = ObjectName("OptimizedModule", "_orig_mod", Need.COPY)
DYNAMO_CTX = ObjectName("OptimizedModule", "dynamo_ctx", Need.COPY)
CALLBACK = ObjectName("OptimizeContext", "callback", Need.COPY)
FULLGRAPH = ObjectName("OptimizeContext", "fullgraph", Need.COPY)
DYNAMIC = ObjectName("OptimizeContext", "_dynamic", Need.COPY)
GET_COMPILER_CONFIG = ObjectName("compiled function", "get_compiler_config", Need.COPY)
ORIG_CALLABLE = ObjectName("compiled function", "_torchdynamo_orig_callable", Need.COPY)

# ---- DDP and process groups --------------------------------------------------------------------

_DDP, _DIST = "DistributedDataParallel", "torch.distributed"
_C10D = f"{_DIST}.distributed_c10d"

GET_ACTIVE_DDP = ObjectName(_DDP, "_get_active_ddp_module", Need.SPLIT)
INSIDE_DDP_FORWARD = ObjectName(_DDP, "_inside_ddp_forward", Need.WATCH)
RUN_DDP_FORWARD = ObjectName(_DDP, "_run_ddp_forward", Need.COPY)
REDUCER = ObjectName(_DDP, "reducer", Need.SPLIT)
LOGGER = ObjectName(_DDP, "logger", Need.REBUCKET)
HAS_REBUILT_BUCKETS = ObjectName(_DDP, "_has_rebuilt_buckets", Need.SPLIT)
GET_LOGGING_DATA = ObjectName(_DDP, "_get_ddp_logging_data", Need.SPLIT)
COMM_HOOKS = ObjectName(_DDP, "_comm_hooks", Need.REBUCKET)
CAP_BYTES = ObjectName(_DDP, "bucket_bytes_cap", Need.SPLIT)
CAP_IS_DEFAULT = ObjectName(_DDP, "bucket_bytes_cap_default", Need.SPLIT)
CAPS_BYTES = ObjectName(_DDP, "bucket_bytes_cap_list", Need.SPLIT)
BUCKET_CONFIG = ObjectName(_DDP, "_bucket_config", Need.REBUCKET, since=(2, 12))
BUILD_PARAMS = ObjectName(_DDP, "_build_params_for_reducer", Need.SPLIT)
JOIN_CONFIG = ObjectName(_DDP, "_join_config", Need.REBUCKET)
DELAYED_PARAMS = ObjectName(_DDP, "_delay_all_reduce_params", Need.ALGORITHMS)
DDP_INIT_HELPER = ObjectName(_DDP, "_ddp_init_helper", Need.REBUCKET)
REMOVE_AUTOGRAD_HOOKS = ObjectName(_DDP, "_remove_autograd_hooks", Need.REBUCKET)
STATIC_ENQUEUED = ObjectName(_DDP, "_static_graph_delay_allreduce_enqueued", Need.REBUCKET)
IGNORED_PARAMETERS = ObjectName(_DDP, "parameters_to_ignore", Need.COPY)
MODULE_PARAMETERS = ObjectName(_DDP, "_module_parameters", Need.COPY)
ASSIGN_BUFFERS = ObjectName(_DDP, "_assign_modules_buffers", Need.COPY)
SYNCS_GRADIENTS = ObjectName(_DDP, "require_backward_grad_sync", Need.COPY)
SYNCS_BUFFERS = ObjectName(_DDP, "require_forward_param_sync", Need.COPY)
OPTIMIZERS_IN_BACKWARD = ObjectName("Parameter", "_in_backward_optimizers", Need.REBUCKET)

ZEROS_LIKE_BUCKETS = ObjectName("Reducer", "_get_zeros_like_grad_buckets", Need.SPLIT)
PREPARE_FOR_FORWARD = ObjectName("Reducer", "prepare_for_forward", Need.REBUCKET)
REDUCER_SET_STATIC = ObjectName("Reducer", "_set_static_graph", Need.REBUCKET)
LOGGER_SET_STATIC = ObjectName("Logger", "_set_static_graph", Need.REBUCKET)
SET_HOOK_NAME = ObjectName("Logger", "_set_comm_hook_name", Need.REBUCKET)
REGISTER_HOOK = ModuleName(_DIST, "_register_comm_hook", Need.REBUCKET)
REGISTER_BUILTIN_HOOK = ModuleName(_DIST, "_register_builtin_comm_hook", Need.REBUCKET)
BUILTIN_HOOKS = ModuleName(_DIST, "BuiltinCommHookType", Need.REBUCKET)
ASSIGN_BUCKETS = ModuleName(_DIST, "_compute_bucket_assignment_by_size", Need.REBUCKET)
FIRST_CAP_BYTES = ModuleName(_DIST, "_DEFAULT_FIRST_BUCKET_BYTES", Need.SPLIT)

GROUP_NAME = ModuleName(_C10D, "_process_group_name", Need.ALGORITHMS)
GROUP_STORE = ModuleName(_C10D, "_get_process_group_store", Need.STORE)
TCP_STORE = ModuleName(_DIST, "TCPStore", Need.STORE)
PREFIX_STORE = ModuleName(_DIST, "PrefixStore", Need.STORE)
GROUP_BACKEND = ObjectName("ProcessGroup", "_get_backend", Need.ALGORITHMS)
SEQUENCE_NUMBER = ObjectName("ProcessGroup", "_get_sequence_number_for_group", Need.REBUCKET)
GROUP_TIMEOUT = ObjectName("ProcessGroup options", "_timeout", Need.ALGORITHMS)

# ---- Autograd ----------------------------------------------------------------------------------

_C, _C_AUTOGRAD = "torch._C", "torch._C._autograd"

TASK_ID = ModuleName(_C, "_current_graph_task_id", Need.SPLIT)
AUTOGRAD_NODE = ModuleName(_C, "_current_autograd_node", Need.BACKWARD)
IS_AUTOCAST_ON = ModuleName(_C, "_is_any_autocast_enabled", Need.BACKWARD)
DISABLE_AUTOCAST = ModuleName(_C, "_DisableAutocast", Need.BACKWARD)
VARIABLE = ModuleName("torch.autograd", "Variable", Need.RECORD)
EXECUTION_ENGINE = ObjectName("Variable", "_execution_engine", Need.RECORD)
QUEUE_CALLBACK = ObjectName("ImperativeEngine", "queue_callback", Need.RECORD)
RECORD_SCOPE = ModuleName("torch._C._profiler", "RecordScope", Need.RECORD)
PREPARE_PROFILER = ModuleName(_C_AUTOGRAD, "_prepare_profiler", Need.RECORD)
ENABLE_PROFILER = ModuleName(_C_AUTOGRAD, "_enable_profiler", Need.RECORD)
DISABLE_PROFILER = ModuleName(_C_AUTOGRAD, "_disable_profiler", Need.RECORD)
PROFILER_ENABLED = ModuleName(_C_AUTOGRAD, "_profiler_enabled", Need.RECORD)
SAVED_TENSOR_HOOKS = ModuleName(_C_AUTOGRAD, "_top_saved_tensors_default_hooks", Need.CHECKPOINT)
CHECKPOINT_FRAME = ModuleName("torch.utils.checkpoint", "_CheckpointFrame", Need.CHECKPOINT)

# ---- Graphs, operators, symbols ----------------------------------------------------------------

_OPS, _FAKE, _SYMBOL = "torch._ops", "torch._subclasses.fake_tensor", "torch.utils._sympy.symbol"

PARAMETER_SOURCES = ObjectName("Dynamo's GraphModule", "_param_name_to_source", Need.SPLIT)
USER_STACKS = ObjectName(
    "Dynamo's GraphModule", "_source_to_user_stacks", Need.SPLIT, since=(2, 12)
)
STOP_REASON = ObjectName("Dynamo's GraphModule", "compile_subgraph_reason", Need.SPLIT)
GRAPH_BREAK = ObjectName("GraphCompileReason", "graph_break", Need.SPLIT)
DYNAMO_SOURCE = ObjectName("Dynamo's placeholder", "_dynamo_source", Need.SPLIT)
SOURCE_NAME = ObjectName("Source", "name", Need.SPLIT)
OVERLOAD = ModuleName(_OPS, "OpOverload", Need.SPLIT)
PACKET = ModuleName(_OPS, "OpOverloadPacket", Need.SPLIT)
HIGHER_ORDER = ModuleName(_OPS, "HigherOrderOperator", Need.SPLIT)
SCHEMA = ObjectName("OpOverload", "_schema", Need.SPLIT)
STORAGE_DATA = ObjectName("UntypedStorage", "_cdata", Need.SPLIT)
IS_OF_FUNCTORCH = ModuleName("torch._C._functorch", "is_functorch_wrapped_tensor", Need.SPLIT)
IS_SUBCLASS = ModuleName(
    "torch.utils._python_dispatch", "is_traceable_wrapper_subclass", Need.BACKWARD
)
FAKE_TENSOR = ModuleName(_FAKE, "FakeTensor", Need.SPLIT)
FAKE_TENSOR_MODE = ModuleName(_FAKE, "FakeTensorMode", Need.SPLIT)
TO_FAKE_TENSOR = ModuleName(f"{_DYNAMO}.utils", "to_fake_tensor", Need.SPLIT)
FAKE_MODE = ObjectName("FakeTensor", "fake_mode", Need.BACKWARD)
SHAPE_ENV = ObjectName("FakeTensorMode", "shape_env", Need.SPLIT)
VALUES = ObjectName("ShapeEnv", "backed_var_to_val", Need.SPLIT)
FREE_SYMBOLS = ModuleName("torch.fx.experimental.symbolic_shapes", "free_symbols", Need.SPLIT)
SYMBOL_IS_TYPE = ModuleName(_SYMBOL, "symbol_is_type", Need.SPLIT)
SYMBOL_TYPES = ModuleName(_SYMBOL, "SymT", Need.SPLIT)
SYM_NODE = ObjectName("SymInt", "node", Need.SPLIT)
HAS_HINT = ObjectName("SymNode", "has_hint", Need.BACKWARD)
HINT = ObjectName("SymNode", "hint", Need.BACKWARD)
MAYBE_AS_INT = ObjectName("SymNode", "maybe_as_int", Need.SPLIT)

# ---- AOTAutograd and Inductor ------------------------------------------------------------------

_AOT = "torch._functorch._aot_autograd.descriptors"
_AOT_CONFIG, _INDUCTOR = "torch._functorch.config", "torch._inductor"

FW_METADATA = ObjectName("TracingContext", "fw_metadata", Need.SPLIT)
AOT_GRAPH_NAME = ObjectName("TracingContext", "aot_graph_name", Need.SPLIT)
PARAMS_FLAT = ObjectName("TracingContext", "params_flat", Need.SPLIT)
PARAMS_UNWRAPPED = ObjectName("TracingContext", "params_flat_unwrap_subclasses", Need.SPLIT)
PARAMS_INDEX = ObjectName("TracingContext", "params_unwrapped_to_flat_index", Need.SPLIT)
OUTPUT_STRIDES = ObjectName("TracingContext", "output_strides", Need.SPLIT)
FAKIFY_FIRST_CALL = ObjectName("TracingContext", "fakify_first_call", Need.SPLIT)
DONATED_IDXS = ObjectName("ViewAndMutationMeta", "bw_donated_idxs", Need.SPLIT)
NO_SAVED_TENSOR_HOOKS = ModuleName(
    f"{_DYNAMO}.utils", "_disable_saved_tensors_hooks_during_tracing", Need.SPLIT
)
DONATED_BUFFER = ModuleName(_AOT_CONFIG, "donated_buffer", Need.SPLIT)
COMPILE_BACKWARD_NOW = ModuleName(_AOT_CONFIG, "force_non_lazy_backward_lowering", Need.SPLIT)
AUTOGRAD_CACHE = ModuleName(_AOT_CONFIG, "enable_autograd_cache", Need.BACKWARD)
REMOTE_AUTOGRAD_CACHE = ModuleName(_AOT_CONFIG, "enable_remote_autograd_cache", Need.BACKWARD)
BUNDLED_AUTOGRAD_CACHE = ModuleName(_AOT_CONFIG, "bundled_autograd_cache", Need.BACKWARD)
CACHE_KEY_TAG = ModuleName("torch.compiler.config", "cache_key_tag", Need.SPLIT)
GRADIENT_OUTPUT = ModuleName(_AOT, "GradAOTOutput", Need.BACKWARD)
PLAIN_INPUT = ModuleName(_AOT, "PlainAOTInput", Need.BACKWARD)
TANGENT_INPUT = ModuleName(_AOT, "TangentAOTInput", Need.BACKWARD)
BOXED_CALL = ObjectName("boxed function", "_boxed_call", Need.BACKWARD)
BOXED_NOP = ModuleName(f"{_DYNAMO}.backends.debugging", "boxed_nop", Need.BACKWARD)
COMPILE_FX = ModuleName(f"{_INDUCTOR}.compile_fx", "compile_fx", Need.BACKWARD)
COMPILE_FX_INNER = ModuleName(f"{_INDUCTOR}.compile_fx", "compile_fx_inner", Need.BACKWARD)
FAKE_TENSOR_PROP = ModuleName("torch.fx.passes.fake_tensor_prop", "FakeTensorProp", Need.BACKWARD)
INDUCTOR = ModuleName("torch", "_TorchCompileInductorWrapper", Need.SPLIT)
INDUCTOR_CONFIG = ObjectName("Inductor wrapper", "config", Need.BACKWARD)
INDUCTOR_OPTIONS = ModuleName(_INDUCTOR, "list_options", Need.SPLIT)
TRITON = ModuleName(f"{_INDUCTOR}.config", "triton", Need.BACKWARD)
CUDAGRAPHS = ObjectName("Inductor's triton config", "cudagraphs", Need.BACKWARD)
FALLBACK_RANDOM = ModuleName(f"{_INDUCTOR}.config", "fallback_random", Need.COPY)

# ---- Modules and logs --------------------------------------------------------------------------

COMPILED_CALL = ObjectName("Module", "_compiled_call_impl", Need.REPLICAS)
FORWARD_PRE_HOOKS = ObjectName("Module", "_forward_pre_hooks", Need.REPLICAS)
FORWARD_HOOKS = ObjectName("Module", "_forward_hooks", Need.REPLICAS)
REPLICATE = ObjectName("Module", "_replicate_for_data_parallel", Need.REPLICAS)
MODULES = ObjectName("Module", "_modules", Need.REPLICAS)
BUFFERS = ObjectName("Module", "_buffers", Need.REPLICAS)
PARAMETERS = ObjectName("Module", "_parameters", Need.REPLICAS)

ARTIFACT_LOGGER = ModuleName("torch._logging", "getArtifactLogger", Need.LOGS)
TRACE_STRUCTURED = ModuleName("torch._logging", "trace_structured", Need.TRACE)

Row = ModuleName | ObjectName
TABLE = tuple(row for row in list(globals().values()) if isinstance(row, Row))


def tested() -> tuple[Release, Release]:
    """Return the first and the last release that any name was seen in."""
    return min(row.since for row in TABLE), max(row.until for row in TABLE)


def tested_range() -> str:
    """Return the releases as people write them, as in `2.11 to 2.15`."""
    return " to ".join(f"{major}.{minor}" for major, minor in tested())


def installed_release() -> Release:
    """Return the installed release of torch, (0, 0) where its version says none."""
    found = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    return (int(found[1]), int(found[2])) if found else (0, 0)
