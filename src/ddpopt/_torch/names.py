"""Every private name of torch that ddpopt touches, one per row; other modules here use the rows.

Private is what torch does not document: what has an underscore in its name or in its module's, and
undocumented attributes of DDP and Dynamo. A row is looked up when it is used, for writing as well
as reading: with a release that moved it this raises `TorchDriftError`, the backend reports that as
`Reason.TORCH_DRIFT`, and training goes on unsplit. See tests/system/test_drift.py.
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


def tested_range() -> str:
    """Return the releases as people write them, such as `2.11 to 2.15`."""
    return " to ".join(f"{major}.{minor}" for major, minor in (FIRST, LAST))


def installed_release() -> Release:
    """Return the installed release of torch, (0, 0) if its version does not say."""
    found = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    return (int(found[1]), int(found[2])) if found else (0, 0)


class Need(enum.Enum):
    """What a name is for, and thus what is lost without it."""

    SPLIT = "splitting graphs under DDP"
    WHOLE = "getting whole graphs from Dynamo"
    BACKWARD = "split='backward'"
    CACHE = "taking cut backwards from torch's cache"
    SIDE_BY_SIDE = "compiling the C++ of sections side by side"
    LAZY = "making the code of a graph only where it is needed"
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
    """A name, its owner (a module, or the usual name of a kind of object), and its releases."""

    owner: str
    name: str
    need: Need
    since: Release = FIRST
    until: Release = LAST

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}"

    @property
    def is_expected(self) -> bool:
        """Whether the installed release should have it; unknown ones after the last should too."""
        release = installed_release()
        return self.since <= release and (self.until == LAST or release <= self.until)

    def drift(self) -> TorchDriftError:
        """Return the error for a release that should have this name but does not."""
        return TorchDriftError(
            f"torch {torch.__version__} has no {self}, which ddpopt needs; "
            f"ddpopt was tested with torch {tested_range()}"
        )

    def of(self, owner: Any) -> Any:
        """Return the name's value in `owner`, or raise TorchDriftError."""
        try:
            return _read(self, owner)
        except AttributeError as error:
            raise self.drift() from error

    def find(self, owner: Any, default: Any = None) -> Any:
        """Return the value; the default if `owner` is another kind of object, or lacks the name."""
        try:
            return _read(self, owner)
        except AttributeError:
            return default

    def is_in(self, owner: Any) -> bool:
        return self.find(owner, _read) is not _read

    def set(self, owner: Any, value: Any) -> None:
        """Give an existing attribute another value, or raise TorchDriftError."""
        try:
            _write(self, owner, value)
        except AttributeError as error:
            raise self.drift() from error

    def mark(self, own: Any, value: Any) -> None:
        """Set on an object of ours what torch looks for on such objects, existing or not."""
        setattr(own, self.name, value)


class ModuleName(PrivateName):
    """An attribute of one of torch's modules, which is imported if it is not yet."""

    __slots__ = ()

    def get(self) -> Any:
        """Return its value, or raise TorchDriftError."""
        return self.of(self._module())

    def replace(self, value: Any) -> None:
        """Put another value in its place, or raise TorchDriftError."""
        self.set(self._module(), value)

    @contextlib.contextmanager
    def replaced_by(self, value: Any) -> Iterator[None]:
        """Put another value in its place in this block."""
        original = self.get()
        self.replace(value)
        try:
            yield
        finally:
            self.replace(original)

    def _module(self) -> Any:
        try:
            return sys.modules.get(self.owner) or importlib.import_module(self.owner)
        except ImportError as error:
            raise self.drift() from error


@contextlib.contextmanager
def settings(values: Mapping[ModuleName, Any]) -> Iterator[None]:
    """Give settings of torch's `config` modules these values in this block."""
    with contextlib.ExitStack() as stack:
        for row, value in values.items():
            row.get()
            config: Any = importlib.import_module(row.owner)
            stack.enter_context(config.patch({row.name: value}))
        yield


# All lookups and writes go through these two, so that tests can hide names.


def _read(row: PrivateName, owner: Any) -> Any:
    return getattr(owner, row.name)


def _write(row: PrivateName, owner: Any, value: Any) -> None:
    getattr(owner, row.name)  # raises if it is missing, since writing would create it
    setattr(owner, row.name, value)


# ---- Dynamo ------------------------------------------------------------------------------------

_DYNAMO, _GUARDS, _EVAL = "torch._dynamo", "torch._guards", "torch._C._dynamo.eval_frame"
_CONFIG, _EXC, _UTILS = f"{_DYNAMO}.config", f"{_DYNAMO}.exc", f"{_DYNAMO}.utils"
_GRAPHS, _COMPILED = f"{_DYNAMO}.output_graph", f"{_DYNAMO}.compiled_autograd"

DDP_OPTIMIZER = ModuleName(f"{_DYNAMO}.backends.distributed", "DDPOptimizer", Need.WHOLE)
ORIG_BACKEND = PrivateName("frame callback", "_torchdynamo_orig_backend", Need.WHOLE)
COMPILER_FN = PrivateName("torch.compile's wrapper", "compiler_fn", Need.WHOLE)
BACKEND_OPTIONS = PrivateName("torch.compile's wrapper", "kwargs", Need.COPY)
LOOKUP_BACKEND = ModuleName(f"{_DYNAMO}.backends.registry", "lookup_backend", Need.SPLIT)
TRACE_RULES_CHECK = ModuleName(f"{_DYNAMO}.trace_rules", "check", Need.WATCH)
GET_OPTIMIZE_DDP_MODE = ModuleName(_UTILS, "get_optimize_ddp_mode", Need.SPLIT)
AUTOGRAD_ENABLED = ModuleName(_COMPILED, "compiled_autograd_enabled", Need.SPLIT)
COMPILED_AUTOGRAD = ModuleName(_CONFIG, "compiled_autograd", Need.SPLIT)
TRACE_AUTOGRAD = ModuleName(_CONFIG, "trace_autograd_ops", Need.SPLIT)
SKIP_FRAME = ModuleName(_EXC, "SkipFrame", Need.ERRORS)
RESTART_ANALYSIS = ModuleName(_EXC, "RestartAnalysis", Need.ERRORS)
UNSUPPORTED = ModuleName(_EXC, "Unsupported", Need.ERRORS)
ALLOWED_FALLBACKS = ModuleName(_GRAPHS, "exceptions_allowed_to_be_fallback", Need.ERRORS)
OPTIMIZE_DDP = ModuleName(_CONFIG, "optimize_ddp", Need.SPLIT)
RECOMPILE_LIMIT = ModuleName(_CONFIG, "recompile_limit", Need.REPLICAS)
ACCUMULATED_LIMIT = ModuleName(_CONFIG, "accumulated_recompile_limit", Need.WATCH)
SKIP_HOOK_GUARDS = ModuleName(_CONFIG, "skip_nnmodule_hook_guards", Need.REPLICAS)
ERROR_ON_FX_TRACE = ModuleName(_CONFIG, "error_on_nested_fx_trace", Need.ESTIMATE)

TRACING_CONTEXT = ModuleName(_GUARDS, "TracingContext", Need.SPLIT)
TRACING = ModuleName(_GUARDS, "tracing", Need.SPLIT)
DETECT_FAKE_MODE = ModuleName(_GUARDS, "detect_fake_mode", Need.SPLIT)
GUARD = ModuleName(_GUARDS, "Guard", Need.GUARD)
GLOBAL_STATE_SOURCE = ModuleName(f"{_DYNAMO}.source", "GlobalStateSource", Need.GUARD)
GUARDS_CONTEXT = PrivateName("TracingContext", "guards_context", Need.GUARD)
DYNAMO_GUARDS = PrivateName("GuardsContext", "dynamo_guards", Need.GUARD)
GUARD_ROOT = PrivateName("GuardManagerWrapper", "root", Need.GUARD)
BUILT_GUARDS = PrivateName("GuardBuilder", "guard_manager", Need.GUARD)
CHECK_FN_MANAGER = PrivateName("GuardBuilder", "check_fn_manager", Need.GUARD)
INVALIDATE = PrivateName("CheckFunctionManager", "invalidate", Need.GUARD)
GUARD_MANAGER = PrivateName("CheckFunctionManager", "guard_manager", Need.GUARD)
ID_MATCHED_OBJS = PrivateName("GuardManagerWrapper", "id_matched_objs", Need.GUARD)
FRAME_CALLBACK = ModuleName(_EVAL, "get_eval_frame_callback", Need.WATCH)
CACHE_ENTRIES = ModuleName(_EVAL, "_debug_get_cache_entry_list", Need.WATCH)
SKIP_CODE = ModuleName(f"{_DYNAMO}.eval_frame", "skip_code", Need.WATCH)

OPTIMIZE = ModuleName(_DYNAMO, "optimize", Need.COPY)
OPTIMIZED_MODULE = ModuleName(_DYNAMO, "OptimizedModule", Need.COPY)
ORIG_MOD = PrivateName("OptimizedModule", "_orig_mod", Need.COPY)
DYNAMO_CTX = PrivateName("OptimizedModule", "dynamo_ctx", Need.COPY)
CALLBACK = PrivateName("OptimizeContext", "callback", Need.COPY)
FULLGRAPH = PrivateName("OptimizeContext", "fullgraph", Need.COPY)
DYNAMIC = PrivateName("OptimizeContext", "_dynamic", Need.COPY)
GET_COMPILER_CONFIG = PrivateName("compiled function", "get_compiler_config", Need.COPY)
ORIG_CALLABLE = PrivateName("compiled function", "_torchdynamo_orig_callable", Need.COPY)

# ---- DDP and process groups --------------------------------------------------------------------

_DDP, _DIST = "DistributedDataParallel", "torch.distributed"
_C10D = f"{_DIST}.distributed_c10d"

GET_ACTIVE_DDP = PrivateName(_DDP, "_get_active_ddp_module", Need.SPLIT)
INSIDE_DDP_FORWARD = PrivateName(_DDP, "_inside_ddp_forward", Need.WATCH)
RUN_DDP_FORWARD = PrivateName(_DDP, "_run_ddp_forward", Need.COPY)
REDUCER = PrivateName(_DDP, "reducer", Need.SPLIT)
LOGGER = PrivateName(_DDP, "logger", Need.REBUCKET)
HAS_REBUILT_BUCKETS = PrivateName(_DDP, "_has_rebuilt_buckets", Need.SPLIT)
GET_LOGGING_DATA = PrivateName(_DDP, "_get_ddp_logging_data", Need.SPLIT)
COMM_HOOKS = PrivateName(_DDP, "_comm_hooks", Need.REBUCKET)
REGISTER_BUILTIN_HOOK = PrivateName(_DDP, "_register_builtin_comm_hook", Need.REBUCKET)
CAP_BYTES = PrivateName(_DDP, "bucket_bytes_cap", Need.SPLIT)
CAP_IS_DEFAULT = PrivateName(_DDP, "bucket_bytes_cap_default", Need.SPLIT)
CAPS_BYTES = PrivateName(_DDP, "bucket_bytes_cap_list", Need.SPLIT)
BUCKET_CONFIG = PrivateName(_DDP, "_bucket_config", Need.REBUCKET, since=(2, 12))
BUILD_PARAMS = PrivateName(_DDP, "_build_params_for_reducer", Need.SPLIT)
JOIN_CONFIG = PrivateName(_DDP, "_join_config", Need.REBUCKET)
DELAYED_PARAMS = PrivateName(_DDP, "_delay_all_reduce_params", Need.SPLIT)
DELAYED_HOOK = PrivateName(_DDP, "_delayed_all_reduce_hook", Need.SPLIT)
TENSOR_HOOKS = PrivateName("Tensor", "_backward_hooks", Need.SPLIT)
DDP_INIT_HELPER = PrivateName(_DDP, "_ddp_init_helper", Need.REBUCKET)
REMOVE_AUTOGRAD_HOOKS = PrivateName(_DDP, "_remove_autograd_hooks", Need.REBUCKET)
STATIC_ENQUEUED = PrivateName(_DDP, "_static_graph_delay_allreduce_enqueued", Need.REBUCKET)
IGNORED_PARAMETERS = PrivateName(_DDP, "parameters_to_ignore", Need.COPY)
MODULE_PARAMETERS = PrivateName(_DDP, "_module_parameters", Need.COPY)
ASSIGN_BUFFERS = PrivateName(_DDP, "_assign_modules_buffers", Need.COPY)
SYNCS_GRADIENTS = PrivateName(_DDP, "require_backward_grad_sync", Need.COPY)
SYNCS_BUFFERS = PrivateName(_DDP, "require_forward_param_sync", Need.COPY)
OPTIMIZERS_IN_BACKWARD = PrivateName("Parameter", "_in_backward_optimizers", Need.REBUCKET)

ZEROS_LIKE_BUCKETS = PrivateName("Reducer", "_get_zeros_like_grad_buckets", Need.SPLIT)
PREPARE_FOR_FORWARD = PrivateName("Reducer", "prepare_for_forward", Need.REBUCKET)
REDUCER_SET_STATIC = PrivateName("Reducer", "_set_static_graph", Need.REBUCKET)
LOGGER_SET_STATIC = PrivateName("Logger", "_set_static_graph", Need.REBUCKET)
BUILTIN_HOOKS = ModuleName(_DIST, "BuiltinCommHookType", Need.REBUCKET)
ASSIGN_BUCKETS = ModuleName(_DIST, "_compute_bucket_assignment_by_size", Need.REBUCKET)
FIRST_CAP_BYTES = ModuleName(_DIST, "_DEFAULT_FIRST_BUCKET_BYTES", Need.SPLIT)

GROUP_NAME = ModuleName(_C10D, "_process_group_name", Need.ALGORITHMS)
GROUP_STORE = ModuleName(_C10D, "_get_process_group_store", Need.STORE)
GROUP_DEVICE = PrivateName("ProcessGroup", "bound_device_id", Need.ALGORITHMS)
GROUP_BACKEND = PrivateName("ProcessGroup", "_get_backend", Need.ALGORITHMS)
SEQUENCE_NUMBER = PrivateName("ProcessGroup", "_get_sequence_number_for_group", Need.REBUCKET)
GROUP_TIMEOUT = PrivateName("ProcessGroup options", "_timeout", Need.ALGORITHMS)

# ---- Optimizers ----------------------------------------------------------------------------------

STEP_PRE_HOOKS = PrivateName("Optimizer", "_optimizer_step_pre_hooks", Need.ALGORITHMS)
STEP_POST_HOOKS = PrivateName("Optimizer", "_optimizer_step_post_hooks", Need.ALGORITHMS)
VERSION = PrivateName("Tensor", "_version", Need.ALGORITHMS)
HOOKED = PrivateName("Optimizer.step", "hooked", Need.ALGORITHMS)

# ---- Autograd ----------------------------------------------------------------------------------

_C, _C_AUTOGRAD = "torch._C", "torch._C._autograd"

TASK_ID = ModuleName(_C, "_current_graph_task_id", Need.SPLIT)
AUTOGRAD_NODE = ModuleName(_C, "_current_autograd_node", Need.BACKWARD)
IS_AUTOCAST_ON = ModuleName(_C, "_is_any_autocast_enabled", Need.BACKWARD)
DISABLE_AUTOCAST = ModuleName(_C, "_DisableAutocast", Need.BACKWARD)
EXECUTION_ENGINE = PrivateName("Variable", "_execution_engine", Need.RECORD)
QUEUE_CALLBACK = PrivateName("ImperativeEngine", "queue_callback", Need.RECORD)
RECORD_SCOPE = ModuleName("torch._C._profiler", "RecordScope", Need.RECORD)
PREPARE_PROFILER = ModuleName(_C_AUTOGRAD, "_prepare_profiler", Need.RECORD)
ENABLE_PROFILER = ModuleName(_C_AUTOGRAD, "_enable_profiler", Need.RECORD)
DISABLE_PROFILER = ModuleName(_C_AUTOGRAD, "_disable_profiler", Need.RECORD)
PROFILER_ENABLED = ModuleName(_C_AUTOGRAD, "_profiler_enabled", Need.RECORD)
SAVED_TENSOR_HOOKS = ModuleName(_C_AUTOGRAD, "_top_saved_tensors_default_hooks", Need.CHECKPOINT)
CHECKPOINT_FRAME = ModuleName("torch.utils.checkpoint", "_CheckpointFrame", Need.CHECKPOINT)

# ---- Graphs, operators, symbols ----------------------------------------------------------------

_OPS, _FAKE, _SYMBOL = "torch._ops", "torch._subclasses.fake_tensor", "torch.utils._sympy.symbol"
_PYTHON, _GRAPH = "torch.utils._python_dispatch", "Dynamo's GraphModule"

PARAMETER_SOURCES = PrivateName(_GRAPH, "_param_name_to_source", Need.SPLIT)
USER_STACKS = PrivateName(_GRAPH, "_source_to_user_stacks", Need.SPLIT, since=(2, 12))
STOP_REASON = PrivateName(_GRAPH, "compile_subgraph_reason", Need.SPLIT)
GRAPH_BREAK = PrivateName("GraphCompileReason", "graph_break", Need.SPLIT)
DYNAMO_SOURCE = PrivateName("Dynamo's placeholder", "_dynamo_source", Need.SPLIT)
SOURCE_NAME = PrivateName("Source", "name", Need.SPLIT)
OVERLOAD = ModuleName(_OPS, "OpOverload", Need.SPLIT)
PACKET = ModuleName(_OPS, "OpOverloadPacket", Need.SPLIT)
HIGHER_ORDER = ModuleName(_OPS, "HigherOrderOperator", Need.SPLIT)
SCHEMA = PrivateName("OpOverload", "_schema", Need.SPLIT)
STORAGE_DATA = PrivateName("UntypedStorage", "_cdata", Need.SPLIT)
IS_OF_FUNCTORCH = ModuleName("torch._C._functorch", "is_functorch_wrapped_tensor", Need.SPLIT)
MAKE_WRAPPER = PrivateName("Tensor", "_make_wrapper_subclass", Need.ALGORITHMS)
IS_SUBCLASS = ModuleName(_PYTHON, "is_traceable_wrapper_subclass", Need.BACKWARD)
FAKE_TENSOR = ModuleName(_FAKE, "FakeTensor", Need.SPLIT)
FAKE_TENSOR_MODE = ModuleName(_FAKE, "FakeTensorMode", Need.SPLIT)
TO_FAKE_TENSOR = ModuleName(_UTILS, "to_fake_tensor", Need.SPLIT)
FAKE_MODE = PrivateName("FakeTensor", "fake_mode", Need.BACKWARD)
SHAPE_ENV = PrivateName("FakeTensorMode", "shape_env", Need.SPLIT)
VALUES = PrivateName("ShapeEnv", "backed_var_to_val", Need.SPLIT)
MAKE_GRAPH_MODULE = ModuleName("torch.fx._lazy_graph_module", "_make_graph_module", Need.LAZY)
FREE_SYMBOLS = ModuleName("torch.fx.experimental.symbolic_shapes", "free_symbols", Need.SPLIT)
SYMBOL_IS_TYPE = ModuleName(_SYMBOL, "symbol_is_type", Need.SPLIT)
SYMBOL_TYPES = ModuleName(_SYMBOL, "SymT", Need.SPLIT)
SYM_NODE = PrivateName("SymInt", "node", Need.SPLIT)
HAS_HINT = PrivateName("SymNode", "has_hint", Need.BACKWARD)
HINT = PrivateName("SymNode", "hint", Need.BACKWARD)
MAYBE_AS_INT = PrivateName("SymNode", "maybe_as_int", Need.SPLIT)

# ---- AOTAutograd and Inductor ------------------------------------------------------------------

_AOT = "torch._functorch._aot_autograd.descriptors"
_AOT_CONFIG, _INDUCTOR = "torch._functorch.config", "torch._inductor"

FW_METADATA = PrivateName("TracingContext", "fw_metadata", Need.SPLIT)
AOT_GRAPH_NAME = PrivateName("TracingContext", "aot_graph_name", Need.SPLIT)
PARAMS_FLAT = PrivateName("TracingContext", "params_flat", Need.SPLIT)
PARAMS_UNWRAPPED = PrivateName("TracingContext", "params_flat_unwrap_subclasses", Need.SPLIT)
PARAMS_INDEX = PrivateName("TracingContext", "params_unwrapped_to_flat_index", Need.SPLIT)
OUTPUT_STRIDES = PrivateName("TracingContext", "output_strides", Need.SPLIT)
FAKIFY_FIRST_CALL = PrivateName("TracingContext", "fakify_first_call", Need.SPLIT)
DONATED_IDXS = PrivateName("ViewAndMutationMeta", "bw_donated_idxs", Need.SPLIT)
TOKENS = PrivateName("ViewAndMutationMeta", "tokens", Need.SPLIT)
NO_SAVED_TENSOR_HOOKS = ModuleName(
    _UTILS, "_disable_saved_tensors_hooks_during_tracing", Need.SPLIT
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
PLAIN_OUTPUT = ModuleName(_AOT, "PlainAOTOutput", Need.BACKWARD)
MUTATION_OUTPUT = ModuleName(_AOT, "InputMutationAOTOutput", Need.BACKWARD)
BASE_OUTPUT = ModuleName(_AOT, "IntermediateBaseAOTOutput", Need.BACKWARD)
FORWARD_TOKEN = ModuleName(_AOT, "ForwardTokenAOTOutput", Need.BACKWARD)
BACKWARD_TOKEN = ModuleName(_AOT, "BackwardTokenAOTOutput", Need.BACKWARD)
BOXED_CALL = PrivateName("boxed function", "_boxed_call", Need.BACKWARD)
# Earlier releases were not examined; with them everything is compiled anew.
OUTPUT_CODE = ModuleName(f"{_INDUCTOR}.output_code", "OutputCode", Need.CACHE, since=(2, 13))
CACHE_KEY = PrivateName("OutputCode", "_fx_graph_cache_key", Need.CACHE, since=(2, 13))
OUTPUT_LOADABLE = ModuleName(
    "torch._functorch._aot_autograd.aot_autograd_result",
    "BundledOutputCodeLoadable",
    Need.CACHE,
    since=(2, 13),
)
BOXED_NOP = ModuleName(f"{_DYNAMO}.backends.debugging", "boxed_nop", Need.BACKWARD)
COMPILE_FX = ModuleName(f"{_INDUCTOR}.compile_fx", "compile_fx", Need.BACKWARD)
COMPILE_FX_INNER = ModuleName(f"{_INDUCTOR}.compile_fx", "compile_fx_inner", Need.BACKWARD)
FAKE_TENSOR_PROP = ModuleName("torch.fx.passes.fake_tensor_prop", "FakeTensorProp", Need.BACKWARD)
INDUCTOR = ModuleName("torch", "_TorchCompileInductorWrapper", Need.SPLIT)
INDUCTOR_CONFIG = PrivateName("Inductor wrapper", "config", Need.BACKWARD)
INDUCTOR_OPTIONS = ModuleName(_INDUCTOR, "list_options", Need.SPLIT)
TRITON = ModuleName(f"{_INDUCTOR}.config", "triton", Need.BACKWARD)
CUDAGRAPHS = PrivateName("Inductor's triton config", "cudagraphs", Need.BACKWARD)
ASYNC_COMPILE = ModuleName(f"{_INDUCTOR}.async_compile", "AsyncCompile", Need.SIDE_BY_SIDE)
WAIT_FOR_KERNELS = PrivateName("AsyncCompile", "wait", Need.SIDE_BY_SIDE)
PROFILE_BANDWIDTH_OUTPUT = ModuleName(
    f"{_INDUCTOR}.config", "profile_bandwidth_output", Need.SIDE_BY_SIDE
)
FALLBACK_RANDOM = ModuleName(f"{_INDUCTOR}.config", "fallback_random", Need.COPY)

# ---- Modules and logs --------------------------------------------------------------------------

COMPILED_CALL = PrivateName("Module", "_compiled_call_impl", Need.REPLICAS)
FORWARD_PRE_HOOKS = PrivateName("Module", "_forward_pre_hooks", Need.REPLICAS)
FORWARD_HOOKS = PrivateName("Module", "_forward_hooks", Need.REPLICAS)
REPLICATE = PrivateName("Module", "_replicate_for_data_parallel", Need.REPLICAS)
MODULES = PrivateName("Module", "_modules", Need.REPLICAS)
BUFFERS = PrivateName("Module", "_buffers", Need.REPLICAS)
PARAMETERS = PrivateName("Module", "_parameters", Need.REPLICAS)

ARTIFACT_LOGGER = ModuleName("torch._logging", "getArtifactLogger", Need.LOGS)
TRACE_STRUCTURED = ModuleName("torch._logging", "trace_structured", Need.TRACE)

TABLE = tuple(row for row in list(globals().values()) if isinstance(row, PrivateName))
