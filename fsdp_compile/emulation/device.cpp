// A CUDA device that computes nothing: a device guard and hooks with which torch's CPU build takes fake tensors for CUDA's.
//
// torch looks for hooks once, while it is imported: launch.py loads this before that.

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>

namespace {

// Streams and events do nothing. The stream is that of device 0: the default index, -1, comes out of torch as garbage.
struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device dev() const { return c10::Device(c10::DeviceType::CUDA, 0); }
  c10::Device exchangeDevice(c10::Device) const override { return dev(); }
  c10::Device getDevice() const override { return dev(); }
  c10::Stream getStream(c10::Device) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, dev()); }
  c10::Stream getDefaultStream(c10::Device) const override { return c10::Stream(c10::Stream::DEFAULT, dev()); }
  c10::Stream getNewStream(c10::Device, int) const override { return c10::Stream(c10::Stream::DEFAULT, dev()); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, dev()); }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override { *event = (void*)1; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct CUDAHooks : at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  int getNumGPUs() const override { return 1; }
  bool isPinnedPtr(const void*) const override { return false; }
};

// Which kernel scaled_dot_product_attention takes. torch's own choice is compiled into its CUDA build
// (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp); this asks the checks that it shares with the CPU's. cuDNN's
// attention, which torch prefers on some GPUs, is left out, as are nested tensors.
int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask,
                         double dropout, bool is_causal, std::optional<double>, bool enable_gqa) {
  const sdp::sdp_params params{query, key, value, mask, dropout, is_causal, enable_gqa};
  const auto dtype = query.scalar_type();
  const bool is_half = dtype == at::kHalf || dtype == at::kBFloat16;
  const bool is_plain = sdp::has_only_dense_inputs(params) && sdp::check_tensor_shapes(params, false) &&
      sdp::check_nonzero_sequence_lengths_dense(params, false) && sdp::check_last_dim_stride_equals_1_dense<true>(params, false) &&
      key.scalar_type() == dtype && value.scalar_type() == dtype;
  if (!is_plain) return static_cast<int64_t>(sdp::SDPBackend::math);
  const auto head = query.sym_size(-1);
  const bool is_one_size = head == key.sym_size(-1) && head == value.sym_size(-1);
  if (is_half && is_one_size && head <= 256 && sdp::check_runtime_disabled_flash(params, false) && sdp::check_for_attn_mask(params, false) &&
      (!is_causal || query.sym_size(-2) == key.sym_size(-2)) && sdp::check_batch_size_and_num_heads_dense<true>(params, false))
    return static_cast<int64_t>(sdp::SDPBackend::flash_attention);
  const int64_t alignment = is_half ? 8 : 4;
  if ((is_half || dtype == at::kFloat) && head % alignment == 0 && value.sym_size(-1) % alignment == 0 &&
      sdp::check_runtime_disabled_mem_efficient(params, false) && sdp::check_batch_size_and_num_heads_dense<false>(params, false))
    return static_cast<int64_t>(sdp::SDPBackend::efficient_attention);
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

}  // namespace

namespace at::native { REGISTER_CUDA_DISPATCH(_fused_sdp_choice_stub, &choose_attention) }

// As REGISTER_CUDA_HOOKS, before those of a CUDA build.
namespace at { C10_REGISTER_CLASS_WITH_PRIORITY(CUDAHooksRegistry, CUDAHooks, c10::REGISTRY_PREFERRED, ::CUDAHooks) }
