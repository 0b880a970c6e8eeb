"""Faults that can be planted into the oracle: name -> what goes wrong."""

STATE_FAULTS = {
    "no_T": "compose with T = identity: S <- S + S_C",
    "forget_left": "the segment's end state replaces the running state: S <- S_C",
    "T_transposed": "compose with T^T, as after mixing up the two state orders",
    "state_over_head": "T and S accumulated from the segment's first row: its head counts twice",
    "no_conv_tail": "the conv context is not replaced at a compose point",
}
ATTENTION_FAULTS = {
    "wrong_rotation": "public K rotated at its offset alone, as if every segment started at 0",
    "rotated_twice": "public K stored rotated, and rotated again when read",
    "no_public_kv": "public K and V are not attended",
    "early_visibility": "a segment's interior is visible to its own head already",
    "stream_positions": "stream tokens rotated at their place in the stream, not at their logical position",
    "separator_positions": "every separator occupies a position",
}
ROTATION_FAULTS = ("wrong_rotation", "rotated_twice", "stream_positions", "separator_positions")
"""Those that need a rotation to show."""
assert ATTENTION_FAULTS.keys() >= {*ROTATION_FAULTS}
SEAM_FAULTS = {
    "seam_off_by_one": "the interior starts one token after the head's end: a token is lost",
    "seam_off_by_one_tail": "the interior ends one token before the tail's start: a token is lost",
    "compose_late": "a segment is composed after its tail instead of before it",
}
CONTEXT_FAULTS = {
    "context_in_positions": "a segment's K is rotated as if its context stood in the prompt, too",
}
ISLAND_FAULTS = {
    "island_counted_twice": "an island's public K and V are read beside those that the stream computes",
    "island_in_states": "an island's rows stay in the state, which the record brings again",
}
WINDOW_FAULTS = {
    "stream_windows": "a window is measured in the stream, where what records serve is missing",
    "public_without_windows": "public K and V are seen at any distance",
}
SOFT_CAP_FAULTS = {
    "public_without_cap": "scores of public K are not capped",
    "private_without_cap": "scores of the stream's own K are not capped",
}
SHARED_KV_FAULTS = {"readers_without_public": "layers that read another's KV see nothing of records"}
LATENT_FAULTS = {"not_rotated": "the shared key of public latents is not rotated when read"}
RELOCATION_FAULTS = {
    "states_not_moved": "states of layers that rotate are composed as they are, wherever the record stands",
}
FAULTS = STATE_FAULTS | ATTENTION_FAULTS | SEAM_FAULTS
"""Planted faults: name -> what goes wrong, in any prompt."""
MORE_FAULTS = {
    **(CONTEXT_FAULTS | ISLAND_FAULTS | WINDOW_FAULTS | SOFT_CAP_FAULTS),
    **(SHARED_KV_FAULTS | LATENT_FAULTS | RELOCATION_FAULTS),
}
"""Those that show where there is such."""
