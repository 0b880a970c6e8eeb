// The types in which vLLM keeps states of Mamba layers.
#pragma once

namespace hypic {

enum class StateType { f32, bf16, f16 };

}  // namespace hypic
