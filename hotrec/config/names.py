"""The rules for names of columns, features and tables.

Names become parts of file names, of keys and of modules, so a name that cannot be all of these is
refused when the configuration is read, and not hours later by its first user.
"""

from __future__ import annotations

from hotrec.config.fields import Rules

MAX_NAME_BYTES = 200  # a file's name has at most 255, including suffixes
_SHOWN = 40
_FORBIDDEN = frozenset("/\\.@ ")

# The attributes of torch.nn.ModuleDict, in which names of tables become keys. Those between double
# underscores are omitted here, because all such names are refused.
_OF_MODULES = """
    T_destination add_module apply bfloat16 buffers call_super_init children clear compile cpu cuda
    double dump_patches eval extra_repr float forward get_buffer get_extra_state get_parameter
    get_submodule half ipu items keys load_state_dict modules mtia named_buffers named_children
    named_modules named_parameters parameters pop register_backward_hook register_buffer
    register_forward_hook register_forward_pre_hook register_full_backward_hook
    register_full_backward_pre_hook register_load_state_dict_post_hook
    register_load_state_dict_pre_hook register_module register_parameter
    register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ set_extra_state
    set_submodule share_memory state_dict to to_empty train training type update values xpu
    zero_grad

    _apply _backward_hooks _backward_pre_hooks _buffers _call_impl _compiled_call_impl
    _forward_hooks _forward_hooks_always_called _forward_hooks_with_kwargs _forward_pre_hooks
    _forward_pre_hooks_with_kwargs _get_backward_hooks _get_backward_pre_hooks _get_name
    _is_full_backward_hook _load_from_state_dict _load_state_dict_post_hooks
    _load_state_dict_pre_hooks _maybe_warn_non_full_backward_hook _modules _named_members
    _non_persistent_buffers_set _parameters _register_load_state_dict_pre_hook
    _register_state_dict_hook _replicate_for_data_parallel _save_to_state_dict _slow_forward
    _state_dict_hooks _state_dict_pre_hooks _version _wrapped_call_impl
"""
RESERVED_NAMES = frozenset(_OF_MODULES.split())


def is_reserved(name: str) -> bool:
    """Whether PyTorch's modules have an attribute of this name."""
    return name in RESERVED_NAMES or (name.startswith("__") and name.endswith("__"))


def name_rules(key: str, name: str, *, is_of_module: bool) -> Rules:
    """The rules for a name.

    Args:
        key: The mapping or value that has the name.
        name: The name.
        is_of_module: Whether it names a feature or table, and not just a column of numbers.
    """
    is_printable = bool(name) and name.isprintable() and not set(name) & _FORBIDDEN
    got = repr(name[:_SHOWN])
    expected = "a printable name without '/', '\\', '.', '@' and blanks"
    yield is_printable, f"{key}: expected {expected}, got {got}. {_advice(key)}"
    # What cannot be printed need not have an encoding.
    size = len(name.encode(errors="replace"))
    expected = f"a name of at most {MAX_NAME_BYTES} bytes"
    yield (
        size <= MAX_NAME_BYTES,
        f"{key}: expected {expected}, got {got}... of {size} bytes. {_advice(key)}",
    )
    yield (
        not (is_of_module and is_reserved(name)),
        f"{key}: expected a name that PyTorch's modules do not use, got {got}. {_advice(key)}",
    )


def _advice(key: str) -> str:
    if key.endswith(".table"):
        return "Choose another name for the table."
    return "Rename the entry and give the log's name as its source."
