"""Every private name of torch that ddpopt touches, one per row; other modules here use the rows.

Private is what has an underscore in its path, and what torch does not document of its objects. A
row is looked up when it is used, for writing as well as reading: with a release that moved it this
raises `TorchDriftError`, the backend reports that as `Reason.TORCH_DRIFT`, and training goes on
unsplit. A name without which only one thing is lost is done without, after a warning. See
tests/system/test_drift.py.

What torch writes into graphs, such as the keys of a node's metadata, is private too, and cannot be
looked up: in a graph to which torch had nothing to write, a key is missing as well. Such texts are
rows of the second kind, `PrivateText`, and a comment says what becomes of a graph without it.

A name that torch renamed is one row still, whose text depends on the release:
`REDUCER = PrivateName(_DDP, "_reducer" if installed_release() >= (2, 16) else "reducer", ...)`.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import logging
import pkgutil
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
    """The releases as people write them, such as `2.11 to 2.15`."""
    return " to ".join(f"{major}.{minor}" for major, minor in (FIRST, LAST))


def installed_release() -> Release:
    """The installed release of torch, (0, 0) if its version does not say."""
    found = re.match(r"(\d+)\.(\d+)", str(torch.__version__))
    return (int(found[1]), int(found[2])) if found else (0, 0)


class Need(enum.Enum):
    """What a name is for, and thus what is lost without it."""

    SPLIT = "splitting graphs under DDP"
    WHOLE = "getting whole graphs from Dynamo"
    BACKWARD = "split='backward'"
    CACHE = "taking cut backwards from torch's cache"
    LAZY = "making the code of a graph only where it is needed"
    GUARD = "compiling anew, and forgetting code, where buckets differ"
    HIDE = "keeping Dynamo out of ddpopt's own code"
    PREDICT = "predicting the buckets of models of which parts are not compiled"
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
    """A name, its owner, and the releases that have it.

    The owner is the path of one of torch's modules or classes, where the name is looked up; or else
    the usual name of a kind of object, and callers give such an object.
    """

    owner: str
    name: str
    need: Need
    since: Release = FIRST
    until: Release | None = None

    def __str__(self) -> str:
        return f"{self.owner}.{self.name}"

    @property
    def is_global(self) -> bool:
        """Whether the owner is a path, where the name is looked up if a caller gives no object."""
        return self.owner.partition(".")[0] == "torch"

    @property
    def is_expected(self) -> bool:
        """Whether the installed release should have it, a later one than we know too."""
        release = installed_release()
        return self.since <= release and (self.until is None or release <= self.until)

    def drift(self) -> TorchDriftError:
        """The error for a release that should have this name but does not."""
        return _drift_of(self)

    def get(self, owner: Any = None) -> Any:
        """The name's value in the object `owner`, or at the owner's path; or TorchDriftError."""
        try:
            return _read(self, self._find_owner(owner))
        except (AttributeError, ImportError) as error:
            raise self.drift() from error

    def find(self, owner: Any, default: Any = None) -> Any:
        """The value; the default if `owner` is another kind of object, or lacks the name."""
        try:
            return _read(self, owner)
        except AttributeError:
            return default

    def is_in(self, owner: Any) -> bool:
        """Whether an object has the name."""
        missing = object()
        return self.find(owner, missing) is not missing

    def is_name_of(self, called: str) -> bool:
        """Whether a call in a graph is one of this function, by the name of what it calls.

        TorchDriftError if torch has no such function: the graph would call it by another name.
        """
        self.get()
        return called == self.name

    def set(self, value: Any, owner: Any = None) -> None:
        """Give the name, which has to exist, another value, or raise TorchDriftError."""
        try:
            _write(self, self._find_owner(owner), value)
        except (AttributeError, ImportError) as error:
            raise self.drift() from error

    @contextlib.contextmanager
    def replaced_by(self, value: Any, owner: Any = None) -> Iterator[None]:
        """Give the name another value in this block."""
        original = self.get(owner)
        self.set(value, owner)
        try:
            yield
        finally:
            self.set(original, owner)

    def set_on_ours(self, own: Any, value: Any) -> None:
        """Set on an object of ours what torch looks for on such objects, existing or not."""
        setattr(own, self.name, value)

    def _find_owner(self, given: Any) -> Any:
        """The object that has the name: the one that a caller gave, or the module or class."""
        if given is not None or not self.is_global:
            return given
        return sys.modules.get(self.owner) or _find_class(self.owner)


@dataclass(frozen=True, slots=True)
class PrivateText:
    """A text that torch writes into graphs or reports, or takes as a keyword, and where it stands.

    The comment at each row says what happens in a release that writes another text.
    """

    where: str
    text: str
    need: Need

    def __str__(self) -> str:
        return f"{self.where} {self.text!r}"

    def drift(self) -> TorchDriftError:
        """The error for a graph that should have this text somewhere, but has it nowhere."""
        return _drift_of(self)


def _drift_of(row: PrivateName | PrivateText) -> TorchDriftError:
    return TorchDriftError(
        f"torch {torch.__version__} has no {row}, which ddpopt needs; "
        f"ddpopt was tested with torch {tested_range()}"
    )


_find_class = functools.cache(pkgutil.resolve_name)  # which tries to import it, slowly, first


@contextlib.contextmanager
def settings(values: Mapping[PrivateName, Any]) -> Iterator[None]:
    """Give settings of torch's `config` modules these values in this block."""
    with contextlib.ExitStack() as stack:
        for row, value in values.items():
            row.get()  # raises TorchDriftError; `patch` would raise something else
            config: Any = importlib.import_module(row.owner)
            stack.enter_context(config.patch({row.name: value}))
        yield


@contextlib.contextmanager
def doing_without(need: Need) -> Iterator[None]:
    """End this block at a name that is missing, with a warning: only `need` is lost then."""
    try:
        yield
    except TorchDriftError as error:
        warn_of(str(error), need)


@functools.cache
def warn_of(missing: str, need: Need) -> None:
    """Warn, once per process, of a name without which only one thing is lost."""
    logging.getLogger(LOG_NAME).warning("%s; training is split without %s", missing, need.value)


# All look-ups and writes go through these two, so that tests can hide names.


def _read(row: PrivateName, owner: Any) -> Any:
    return getattr(owner, row.name)


def _write(row: PrivateName, owner: Any, value: Any) -> None:
    getattr(owner, row.name)  # raises if it is missing, since writing would create it
    setattr(owner, row.name, value)


# ---- Dynamo ------------------------------------------------------------------------------------

_DYNAMO, _GUARDS, _EVAL = "torch._dynamo", "torch._guards", "torch._C._dynamo.eval_frame"
_CONFIG, _EXC, _UTILS = f"{_DYNAMO}.config", f"{_DYNAMO}.exc", f"{_DYNAMO}.utils"
_GRAPHS, _COMPILED = f"{_DYNAMO}.output_graph", f"{_DYNAMO}.compiled_autograd"

DDP_OPTIMIZER = PrivateName(f"{_DYNAMO}.backends.distributed", "DDPOptimizer", Need.WHOLE)
ORIG_BACKEND = PrivateName("frame callback", "_torchdynamo_orig_backend", Need.WHOLE)
COMPILER_FN = PrivateName("wrapper of torch.compile", "compiler_fn", Need.WHOLE)
CACHED_BACKENDS = PrivateName(f"{_DYNAMO}.eval_frame", "cached_backends", Need.GUARD)
BACKEND_OPTIONS = PrivateName("wrapper of torch.compile", "kwargs", Need.COPY)
LOOKUP_BACKEND = PrivateName(f"{_DYNAMO}.backends.registry", "lookup_backend", Need.SPLIT)
TRACE_RULES_CHECK = PrivateName(f"{_DYNAMO}.trace_rules", "check", Need.WATCH)
AUTOGRAD_ENABLED = PrivateName(_COMPILED, "compiled_autograd_enabled", Need.SPLIT)
COMPILED_AUTOGRAD = PrivateName(_CONFIG, "compiled_autograd", Need.SPLIT)
TRACE_AUTOGRAD = PrivateName(_CONFIG, "trace_autograd_ops", Need.SPLIT)
SKIP_FRAME = PrivateName(_EXC, "SkipFrame", Need.ERRORS)
RESTART_ANALYSIS = PrivateName(_EXC, "RestartAnalysis", Need.ERRORS)
UNSUPPORTED = PrivateName(_EXC, "Unsupported", Need.ERRORS)
ALLOWED_FALLBACKS = PrivateName(_GRAPHS, "exceptions_allowed_to_be_fallback", Need.ERRORS)
OPTIMIZE_DDP = PrivateName(_CONFIG, "optimize_ddp", Need.SPLIT)
RECOMPILE_LIMIT = PrivateName(_CONFIG, "recompile_limit", Need.REPLICAS)
ACCUMULATED_LIMIT = PrivateName(_CONFIG, "accumulated_recompile_limit", Need.WATCH)
DISPATCH_MODES = PrivateName(
    "torch.utils._python_dispatch", "_get_current_dispatch_mode_stack", Need.WATCH
)
LETS_COMPILE = PrivateName("TorchDispatchMode", "ignore_compile_internals", Need.WATCH)
SKIP_HOOK_GUARDS = PrivateName(_CONFIG, "skip_nnmodule_hook_guards", Need.REPLICAS)
ERROR_ON_FX_TRACE = PrivateName(_CONFIG, "error_on_nested_fx_trace", Need.ESTIMATE)

TRACING_CONTEXT = PrivateName(_GUARDS, "TracingContext", Need.SPLIT)
TRACED_CODE = PrivateName("TracingContext", "traced_code", Need.PREDICT)
RESUMED_CODE = PrivateName(
    f"{_DYNAMO}.resume_execution", "TORCH_DYNAMO_RESUME_IN_PREFIX", Need.PREDICT
)
TRACING = PrivateName(_GUARDS, "tracing", Need.SPLIT)
DETECT_FAKE_MODE = PrivateName(_GUARDS, "detect_fake_mode", Need.SPLIT)
GUARD = PrivateName(_GUARDS, "Guard", Need.GUARD)
GLOBAL_STATE_SOURCE = PrivateName(f"{_DYNAMO}.source", "GlobalStateSource", Need.GUARD)
GUARDS_CONTEXT = PrivateName("TracingContext", "guards_context", Need.GUARD)
DYNAMO_GUARDS = PrivateName("GuardsContext", "dynamo_guards", Need.GUARD)
GUARD_ROOT = PrivateName("GuardManagerWrapper", "root", Need.GUARD)
BUILT_GUARDS = PrivateName("GuardBuilder", "guard_manager", Need.GUARD)
CHECK_FN_MANAGER = PrivateName("GuardBuilder", "check_fn_manager", Need.GUARD)
INVALIDATE = PrivateName("CheckFunctionManager", "invalidate", Need.GUARD)
GUARD_MANAGER = PrivateName("CheckFunctionManager", "guard_manager", Need.GUARD)
ID_MATCHED_OBJS = PrivateName("GuardManagerWrapper", "id_matched_objs", Need.GUARD)
FRAME_CALLBACK = PrivateName(_EVAL, "get_eval_frame_callback", Need.WATCH)
CACHE_ENTRIES = PrivateName(_EVAL, "_debug_get_cache_entry_list", Need.WATCH)
# The files, and the code with all that it calls, that Dynamo leaves alone. The public
# `torch.compiler.disable` would not do: see [Note: hidden code].
FORCE_SKIP_FILES = PrivateName(f"{_DYNAMO}.trace_rules", "FORCE_SKIP_FILES", Need.HIDE)
SET_STRATEGY = PrivateName(_EVAL, "set_code_exec_strategy", Need.HIDE)
FRAME_STRATEGY = PrivateName(f"{_DYNAMO}.types", "FrameExecStrategy", Need.HIDE)
FRAME_ACTION = PrivateName(f"{_DYNAMO}.types", "FrameAction", Need.HIDE)

OPTIMIZED_MODULE = PrivateName(_DYNAMO, "OptimizedModule", Need.COPY)
ORIG_MOD = PrivateName("OptimizedModule", "_orig_mod", Need.COPY)
ORIG_CALLABLE = PrivateName("compiled function", "_torchdynamo_orig_callable", Need.COPY)
WRAP_INLINE = PrivateName(f"{_DYNAMO}.external_utils", "wrap_inline", Need.COPY)
DYNAMO_CTX = PrivateName("OptimizedModule", "dynamo_ctx", Need.COPY)
CALLBACK = PrivateName("OptimizeContext", "callback", Need.COPY)
FULLGRAPH = PrivateName("OptimizeContext", "fullgraph", Need.COPY)
DYNAMIC = PrivateName("OptimizeContext", "_dynamic", Need.COPY)
GET_COMPILER_CONFIG = PrivateName("compiled function", "get_compiler_config", Need.COPY)

# ---- DDP and process groups --------------------------------------------------------------------

_DDP, _DIST = "DistributedDataParallel", "torch.distributed"
_C10D = f"{_DIST}.distributed_c10d"

GET_ACTIVE_DDP = PrivateName(_DDP, "_get_active_ddp_module", Need.SPLIT)
RUN_DDP_FORWARD = PrivateName(_DDP, "_run_ddp_forward", Need.WATCH)
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
TENSOR_VERSION = PrivateName("Tensor", "_version", Need.BACKWARD)
TENSOR_HOOKS = PrivateName("Tensor", "_backward_hooks", Need.SPLIT)
ACCUMULATED_HOOKS = PrivateName("Tensor", "_post_accumulate_grad_hooks", Need.COPY)
DDP_INIT_HELPER = PrivateName(_DDP, "_ddp_init_helper", Need.REBUCKET)
REMOVE_AUTOGRAD_HOOKS = PrivateName(_DDP, "_remove_autograd_hooks", Need.REBUCKET)
STATIC_ENQUEUED = PrivateName(_DDP, "_static_graph_delay_allreduce_enqueued", Need.REBUCKET)
IGNORED_PARAMETERS = PrivateName(_DDP, "parameters_to_ignore", Need.COPY)
MODULE_PARAMETERS = PrivateName(_DDP, "_module_parameters", Need.SPLIT)
ASSIGN_BUFFERS = PrivateName(_DDP, "_assign_modules_buffers", Need.COPY)
SYNCS_GRADIENTS = PrivateName(_DDP, "require_backward_grad_sync", Need.SPLIT)
SYNCS_BUFFERS = PrivateName(_DDP, "require_forward_param_sync", Need.COPY)
OPTIMIZERS_IN_BACKWARD = PrivateName("Parameter", "_in_backward_optimizers", Need.REBUCKET)

ZEROS_LIKE_BUCKETS = PrivateName("Reducer", "_get_zeros_like_grad_buckets", Need.SPLIT)
PREPARE_FOR_FORWARD = PrivateName("Reducer", "prepare_for_forward", Need.REBUCKET)
PREPARE_FOR_BACKWARD = PrivateName("Reducer", "prepare_for_backward", Need.REBUCKET)
AUTOGRAD_HOOK = PrivateName("Reducer", "_autograd_hook", Need.REBUCKET)
DELAY_ALL_REDUCE = PrivateName("Reducer", "_delay_all_reduce", Need.REBUCKET)
REBUILD_BUCKETS = PrivateName("Reducer", "_rebuild_buckets", Need.REBUCKET)
BACKWARD_STATS = PrivateName("Reducer", "get_backward_stats", Need.REBUCKET)
CHECK_FINALIZED = PrivateName("Reducer", "_check_reducer_finalized", Need.REBUCKET)
LOCAL_USED_MAP = PrivateName("Reducer", "_get_local_used_map", Need.REBUCKET)
REDUCER_SET_STATIC = PrivateName("Reducer", "_set_static_graph", Need.REBUCKET)
LOGGER_SET_STATIC = PrivateName("Logger", "_set_static_graph", Need.REBUCKET)
BUILTIN_HOOKS = PrivateName(_DIST, "BuiltinCommHookType", Need.REBUCKET)
ASSIGN_BUCKETS = PrivateName(_DIST, "_compute_bucket_assignment_by_size", Need.REBUCKET)
FIRST_CAP_BYTES = PrivateName(_DIST, "_DEFAULT_FIRST_BUCKET_BYTES", Need.SPLIT)

GROUP_NAME = PrivateName(_C10D, "_process_group_name", Need.ALGORITHMS)
GROUP_STORE = PrivateName(_C10D, "_get_process_group_store", Need.STORE)
GROUP_DEVICE = PrivateName("ProcessGroup", "bound_device_id", Need.ALGORITHMS)
GROUP_BACKEND = PrivateName("ProcessGroup", "_get_backend", Need.ALGORITHMS)
GROUP_TIMEOUT = PrivateName("ProcessGroup options", "_timeout", Need.ALGORITHMS)

# ---- Optimizers ----------------------------------------------------------------------------------

STEP_HOOKS = PrivateName("Optimizer", "_optimizer_step_pre_hooks", Need.ALGORITHMS)
IS_HOOKED = PrivateName("Optimizer.step", "hooked", Need.ALGORITHMS)

# ---- Autograd ----------------------------------------------------------------------------------

_C, _C_AUTOGRAD = "torch._C", "torch._C._autograd"
_ENGINE = "torch.autograd.Variable._execution_engine"

TASK_ID = PrivateName(_C, "_current_graph_task_id", Need.SPLIT)
WILL_EXECUTE = PrivateName(_C, "_will_engine_execute_node", Need.REBUCKET)
QUEUE_CALLBACK = PrivateName(_ENGINE, "queue_callback", Need.RECORD)
RECORD_SCOPE = PrivateName("torch._C._profiler", "RecordScope", Need.RECORD)
PREPARE_PROFILER = PrivateName(_C_AUTOGRAD, "_prepare_profiler", Need.RECORD)
ENABLE_PROFILER = PrivateName(_C_AUTOGRAD, "_enable_profiler", Need.RECORD)
DISABLE_PROFILER = PrivateName(_C_AUTOGRAD, "_disable_profiler", Need.RECORD)
PROFILER_ENABLED = PrivateName(_C_AUTOGRAD, "_profiler_enabled", Need.RECORD)
SAVED_TENSOR_HOOKS = PrivateName(_C_AUTOGRAD, "_top_saved_tensors_default_hooks", Need.CHECKPOINT)
CHECKPOINT_FRAME = PrivateName("torch.utils.checkpoint", "_CheckpointFrame", Need.CHECKPOINT)

# ---- Graphs, operators, symbols ----------------------------------------------------------------

_FAKE, _GRAPH = "torch._subclasses.fake_tensor", "Dynamo's GraphModule"
_FUNCTORCH, _AUTOCAST = "torch._C._functorch", "torch.amp.autocast_mode"

PARAMETER_SOURCES = PrivateName(_GRAPH, "_param_name_to_source", Need.SPLIT)
USER_STACKS = PrivateName(_GRAPH, "_source_to_user_stacks", Need.SPLIT, since=(2, 12))
STOP_REASON = PrivateName(_GRAPH, "compile_subgraph_reason", Need.SPLIT)
GRAPH_BREAK = PrivateName("GraphCompileReason", "graph_break", Need.SPLIT)
DYNAMO_SOURCE = PrivateName("Dynamo's placeholder", "_dynamo_source", Need.SPLIT)
SOURCE_NAME = PrivateName("Source", "name", Need.SPLIT)
HIGHER_ORDER = PrivateName("torch._ops", "HigherOrderOperator", Need.SPLIT)
SCHEMA = PrivateName("OpOverload", "_schema", Need.SPLIT)
IS_VIEW = PrivateName("OpOverload", "is_view", Need.BACKWARD)
UNSAFE_VIEW = PrivateName("torch.ops.aten", "_unsafe_view", Need.BACKWARD)
WITH_EFFECTS = PrivateName("torch._higher_order_ops.effects", "with_effects", Need.BACKWARD)
TRITON_KERNEL = PrivateName(
    "torch._higher_order_ops.triton_kernel_wrap", "triton_kernel_wrapper_mutation", Need.SPLIT
)
IS_OF_FUNCTORCH = PrivateName(_FUNCTORCH, "is_functorch_wrapped_tensor", Need.SPLIT)
FAKE_TENSOR = PrivateName(_FAKE, "FakeTensor", Need.SPLIT)
FAKE_TENSOR_MODE = PrivateName(_FAKE, "FakeTensorMode", Need.SPLIT)
TO_FAKE_TENSOR = PrivateName(_UTILS, "to_fake_tensor", Need.SPLIT)
SHAPE_ENV = PrivateName("FakeTensorMode", "shape_env", Need.SPLIT)
VALUES = PrivateName("ShapeEnv", "backed_var_to_val", Need.SPLIT)
PROXY_MODE = PrivateName("torch.fx.experimental.proxy_tensor", "get_proxy_mode", Need.BACKWARD)
TRACER = PrivateName("ProxyTorchDispatchMode", "tracer", Need.BACKWARD)
MAKE_GRAPH_MODULE = PrivateName("torch.fx._lazy_graph_module", "_make_graph_module", Need.LAZY)
SYM_NODE = PrivateName("SymInt", "node", Need.SPLIT)
HINT = PrivateName("SymNode", "hint", Need.BACKWARD)

# Dynamo's graphs call these, which switch something on or off for the calls after them. They are
# told by their names, and looked up in each graph all the same: under another name they would look
# like any call, and a section could begin with gradients on where they are off. (Dynamo may call
# functorch's by wrappers of the same names.)
ENTER_AUTOCAST = PrivateName(_AUTOCAST, "_enter_autocast", Need.SPLIT)
EXIT_AUTOCAST = PrivateName(_AUTOCAST, "_exit_autocast", Need.SPLIT)
SET_GRAD_ENABLED = PrivateName(_C, "_set_grad_enabled", Need.SPLIT)
ENTER_VMAP = PrivateName(_FUNCTORCH, "_vmap_increment_nesting", Need.SPLIT)
EXIT_VMAP = PrivateName(_FUNCTORCH, "_vmap_decrement_nesting", Need.SPLIT)
ENTER_GRAD = PrivateName(_FUNCTORCH, "_grad_increment_nesting", Need.SPLIT)
EXIT_GRAD = PrivateName(_FUNCTORCH, "_grad_decrement_nesting", Need.SPLIT)
ENTER_JVP = PrivateName(_FUNCTORCH, "_jvp_increment_nesting", Need.SPLIT)
EXIT_JVP = PrivateName(_FUNCTORCH, "_jvp_decrement_nesting", Need.SPLIT)
DISABLE_SAVED_HOOKS = PrivateName(_C_AUTOGRAD, "_saved_tensors_hooks_disable", Need.SPLIT)
ENABLE_SAVED_HOOKS = PrivateName(_C_AUTOGRAD, "_saved_tensors_hooks_enable", Need.SPLIT)
CHOOSE_ATTENTION = PrivateName("torch.nn.attention", "_sdpa_kernel", Need.SPLIT)
ENTER_DUAL_LEVEL = PrivateName(_C, "_enter_dual_level", Need.SPLIT)
EXIT_DUAL_LEVEL = PrivateName(_C, "_exit_dual_level", Need.SPLIT)

# ---- AOTAutograd and Inductor ------------------------------------------------------------------

_AOT = "torch._functorch._aot_autograd.descriptors"
_AOT_CONFIG, _INDUCTOR = "torch._functorch.config", "torch._inductor"

FW_METADATA = PrivateName("TracingContext", "fw_metadata", Need.SPLIT)
FAKIFY_FIRST_CALL = PrivateName("TracingContext", "fakify_first_call", Need.SPLIT)
DONATED_IDXS = PrivateName("ViewAndMutationMeta", "bw_donated_idxs", Need.SPLIT)
TOKENS = PrivateName("ViewAndMutationMeta", "tokens", Need.SPLIT)
NO_SAVED_TENSOR_HOOKS = PrivateName(
    _UTILS, "_disable_saved_tensors_hooks_during_tracing", Need.SPLIT
)
DONATED_BUFFER = PrivateName(_AOT_CONFIG, "donated_buffer", Need.SPLIT)
COMPILE_BACKWARD_NOW = PrivateName(_AOT_CONFIG, "force_non_lazy_backward_lowering", Need.SPLIT)
AUTOGRAD_CACHE = PrivateName(_AOT_CONFIG, "enable_autograd_cache", Need.BACKWARD)
REMOTE_AUTOGRAD_CACHE = PrivateName(_AOT_CONFIG, "enable_remote_autograd_cache", Need.BACKWARD)
BUNDLED_AUTOGRAD_CACHE = PrivateName(_AOT_CONFIG, "bundled_autograd_cache", Need.BACKWARD)
GRADIENT_OUTPUT = PrivateName(_AOT, "GradAOTOutput", Need.BACKWARD)
PLAIN_INPUT = PrivateName(_AOT, "PlainAOTInput", Need.BACKWARD)
GRADIENT_OF = PrivateName("GradAOTOutput", "grad_of", Need.BACKWARD)
INPUT_INDEX = PrivateName("PlainAOTInput", "idx", Need.BACKWARD)
BOXED_CALL = PrivateName("boxed function", "_boxed_call", Need.BACKWARD)
# Earlier releases were not examined; with them everything is compiled anew.
OUTPUT_CODE = PrivateName(f"{_INDUCTOR}.output_code", "OutputCode", Need.CACHE, since=(2, 13))
CACHE_KEY = PrivateName("OutputCode", "_fx_graph_cache_key", Need.CACHE, since=(2, 13))
OUTPUT_LOADABLE = PrivateName(
    "torch._functorch._aot_autograd.aot_autograd_result",
    "BundledOutputCodeLoadable",
    Need.CACHE,
    since=(2, 13),
)
BOXED_NOP = PrivateName(f"{_DYNAMO}.backends.debugging", "boxed_nop", Need.BACKWARD)
COMPILE_FX = PrivateName(f"{_INDUCTOR}.compile_fx", "compile_fx", Need.BACKWARD)
COMPILE_FX_INNER = PrivateName(f"{_INDUCTOR}.compile_fx", "compile_fx_inner", Need.BACKWARD)
INDUCTOR = PrivateName("torch", "_TorchCompileInductorWrapper", Need.SPLIT)
INDUCTOR_CONFIG = PrivateName("Inductor wrapper", "config", Need.BACKWARD)
INDUCTOR_OPTIONS = PrivateName(_INDUCTOR, "list_options", Need.SPLIT)
CUDAGRAPHS = PrivateName(f"{_INDUCTOR}.config.triton", "cudagraphs", Need.BACKWARD)
FALLBACK_RANDOM = PrivateName(f"{_INDUCTOR}.config", "fallback_random", Need.COPY)
REORDER_FOR_MEMORY = PrivateName(f"{_INDUCTOR}.config", "reorder_for_peak_memory", Need.SPLIT)
DISABLED_PASSES = PrivateName(f"{_INDUCTOR}.config", "disabled_passes", Need.SPLIT)
# Inductor calls the pass by the name of this function.
REINPLACE_PASS = PrivateName(
    f"{_INDUCTOR}.fx_passes.reinplace", "reinplace_inplaceable_ops", Need.SPLIT
)

# ---- Modules and logs --------------------------------------------------------------------------

BACKWARD_HOOKS = PrivateName("Module", "_backward_hooks", Need.WATCH)
BACKWARD_PRE_HOOKS = PrivateName("Module", "_backward_pre_hooks", Need.WATCH)
HAS_FULL_HOOKS = PrivateName("Module", "_is_full_backward_hook", Need.WATCH)
COMPILED_CALL = PrivateName("Module", "_compiled_call_impl", Need.REPLICAS)
FORWARD_PRE_HOOKS = PrivateName("Module", "_forward_pre_hooks", Need.REPLICAS)
FORWARD_HOOKS = PrivateName("Module", "_forward_hooks", Need.REPLICAS)
REPLICATE = PrivateName("Module", "_replicate_for_data_parallel", Need.REPLICAS)
MODULES = PrivateName("Module", "_modules", Need.REPLICAS)
BUFFERS = PrivateName("Module", "_buffers", Need.REPLICAS)
PARAMETERS = PrivateName("Module", "_parameters", Need.REPLICAS)

# No public name walks nested containers, in 2.11 to 2.15; torch.func and torch.export use it.
_PYTREE = "torch.utils._pytree"
FLATTEN = PrivateName(_PYTREE, "tree_flatten_with_path", Need.ALGORITHMS)
UNFLATTEN = PrivateName(_PYTREE, "tree_unflatten", Need.ALGORITHMS)
PATH_TEXT = PrivateName(_PYTREE, "keystr", Need.ALGORITHMS)

ARTIFACT_LOGGER = PrivateName("torch._logging", "getArtifactLogger", Need.LOGS)
TRACE_STRUCTURED = PrivateName("torch._logging", "trace_structured", Need.TRACE)

# TORCH_LOGS knows loggers by the modules of torch that own them: a child of this one is shown
# under dynamo, distributed and ddp alike.
LOG_NAME = f"{DDP_OPTIMIZER.owner}.ddpopt"

TABLE = tuple(row for row in list(globals().values()) if isinstance(row, PrivateName))

# ---- Texts -------------------------------------------------------------------------------------

_NODE, _GRAPH_META, _LOG = "node metadata", "graph metadata", "entry of DDP's log"
_PLACEHOLDER, _KEYWORD = "placeholder name", "keyword of Inductor's inner compiler"

# Without it: a plan is refused for a module that is wrapped once it was made.
CHECKPOINT_WRAPPED = PrivateText(
    "the names of what is in an activation checkpoint's wrapper",
    "_checkpoint_wrapped_module",
    Need.REBUCKET,
)
# Without it the graph is not cut (TorchDriftError): it would seem to write to no memory.
EXAMPLE_VALUE = PrivateText(_NODE, "example_value", Need.SPLIT)
# Without it the graph is not cut (TorchDriftError): all graphs would have one name.
COMPILE_ID = PrivateText(_GRAPH_META, "dynamo_compile_id", Need.SPLIT)
# Without it: the backward of a graph for which a program asks for CUDA graphs is cut all the same.
# LIMIT: without `override_cudagraphs` the key is not there either, so nobody notices.
CUDA_GRAPHS_WANTED = PrivateText(_GRAPH_META, "cudagraph_annotation", Need.BACKWARD)
# Without it: AOTAutograd's cache takes a graph with hooks on saved tensors for one without.
# LIMIT: without such hooks the attributes are not there either, so nobody notices.
SAVED_TENSORS_HOOKS = PrivateText("attribute of Dynamo's graph", "saved_tensors_hooks_", Need.SPLIT)
# Without it: calls on streams are taken for those of a library that nobody knows.
# LIMIT: such a call keeps its place among effects, but the calls on its stream may leave it.
STREAMS = PrivateText("operator library", "streams", Need.SPLIT)
# Without it: such a call is not known to be pure, so it keeps its place.
RUNNING_GRAPHS = PrivateText(
    "higher-order operators",
    "associative_scan autograd_function_apply cond flex_attention flex_attention_backward "
    "invoke_subgraph map_impl scan tag_activation_checkpoint triton_kernel_wrapper_functional "
    "while_loop wrap",
    Need.SPLIT,
)
# Without it: the proof does not see where the backward of an autograd.Function ends.
FUNCTION_APPLY = PrivateText("higher-order operators", "autograd_function_apply", Need.BACKWARD)
# Without it: they are taken for pure; WITH_EFFECTS, which stands in the same graphs, is found all
# the same.
EFFECT_TOKENS = PrivateText("operators", "_make_token.default _sink_tokens.default", Need.BACKWARD)
# Without it: the CPU's attention counts as no arithmetic, as all operators without a formula do.
FOR_CPU = PrivateText("operator name ending", "_for_cpu", Need.ESTIMATE)
# Without it the graph is not cut (TorchDriftError): its inputs would seem to be in nobody's
# memory.
VALUE = PrivateText(_NODE, "val", Need.BACKWARD)
# Without it the graph is not cut (TorchDriftError): the proof would not see where autograd nodes
# end.
AUTOGRAD_NUMBER = PrivateText(_NODE, "seq_nr", Need.BACKWARD)
# Without it: marks are lost; if all are, TorchDriftError, the graph is not cut.
# LIMIT: some marks may be left, where torch copies nodes rather than makes others of them.
CUSTOM = PrivateText(_NODE, "custom", Need.BACKWARD)
# Without it: to wait for a collective seems to be one: a backward is cut there as well.
WAIT_TENSOR = PrivateText("operator", "_c10d_functional.wait_tensor.default", Need.BACKWARD)
# Without it the graph is not cut (TorchDriftError): no value that it saves would seem to be an
# argument.
DESCRIPTION = PrivateText(_NODE, "desc", Need.BACKWARD)
# Without it the graph is not cut (TorchDriftError): tangents would seem to be saved tensors.
TANGENTS = PrivateText(_PLACEHOLDER, "tangents_", Need.BACKWARD)
# Without it: Inductor orders kernels as if parameters were freed after their last use.
PRIMALS = PrivateText(_PLACEHOLDER, "primals_", Need.BACKWARD)
# Without it the graph is not cut (TorchDriftError): sections rely on those strides.
STRIDES_KEPT = PrivateText(_NODE, "user_visible_output_idxs", Need.BACKWARD)
# Without it: as without 'primals_'; Inductor reads the name.
HELD_NAME = PrivateText(_PLACEHOLDER, "arg", Need.BACKWARD)
# Without it: no backward is found: Reason.BACKWARD_FAILED.
IS_BACKWARD = PrivateText(_KEYWORD, "is_backward", Need.BACKWARD)
# Without it: Inductor does not take it from us: Reason.BACKWARD_FAILED.
STATIC_INPUTS = PrivateText(_KEYWORD, "static_input_idxs", Need.BACKWARD)
# Without it: what sections take in backward is not recorded.
COMPILED_BACKWARD = PrivateText("autograd node name", "CompiledFunctionBackward", Need.RECORD)

# Without it: buckets of a module that was copied or loaded count as not yet final.
HAS_REBUILT = PrivateText(_LOG, "has_rebuilt_buckets", Need.SPLIT)
# Without it: final buckets are never known, and cuts stay where they are predicted.
REBUILT_BUCKETS = PrivateText(_LOG, "rebuilt_per_bucket_param_indices", Need.SPLIT)
# Without it: a module seems to have no comm hook, and loses it with its Reducer.
# LIMIT: without a hook the entry is not there either, so nobody notices.
COMM_HOOK = PrivateText(_LOG, "comm_hook", Need.REBUCKET)
# Without it: all steps that DDP timed are number 0.
ITERATION = PrivateText(_LOG, "iteration", Need.RECORD)
# Without it: forward took 0 s.
FORWARD_TIME = PrivateText(_LOG, "forward_compute_time", Need.RECORD)
# Without it: backward took 0 s.
BACKWARD_TIME = PrivateText(_LOG, "backward_compute_time", Need.RECORD)
# Without it: allreduces took 0 s.
COMM_TIME = PrivateText(_LOG, "backward_comm_time", Need.RECORD)
# Without it: no allreduce was overlapped.
OVERLAP_TIME = PrivateText(_LOG, "backward_compute_comm_overlap_time", Need.RECORD)
# Without it: gradients have 0 bytes together.
NUM_BYTES = PrivateText(_LOG, "total_parameter_size_bytes", Need.RECORD)

TEXTS = tuple(row for row in list(globals().values()) if isinstance(row, PrivateText))
