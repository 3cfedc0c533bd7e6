// A CUDA device that does nothing, for a torch without CUDA: what autograd asks of a device before
// it runs the backward pass of fake tensors. `no_gpu.py` builds and loads it.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

bool is_there = false;

struct NoGpu final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override {
    return {c10::DeviceType::CUDA, 0};
  }
  c10::Device exchangeDevice(c10::Device) const override {
    return getDevice();
  }
  c10::Stream getStream(c10::Device device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, device);
  }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag)
      const override {}
  void block(void*, const c10::Stream&) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override {
    return is_there;
  }
  bool isBuilt() const override {
    return is_there;
  }
  bool isAvailable() const override {
    return is_there;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return false;
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, NoGpu)

} // namespace

extern "C" void pretend_gpu(int there) {
  // torch has made its own hooks when it was imported, and asks no registry again. They have no
  // members, so that theirs can become ours.
  static const Hooks hooks{};
  auto& found = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(&found) = *reinterpret_cast<void* const*>(&hooks);
  is_there = there;
}
