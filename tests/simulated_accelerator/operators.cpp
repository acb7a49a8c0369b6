// Every operation without a kernel of its own: shapes come from its meta kernel, and its CPU kernel runs later.
#include "operators.h"

#include "random.h"
#include "python.h"

#include <ATen/ATen.h>
#include <ATen/native/CPUFallback.h>
#include <torch/library.h>

namespace simulated {
namespace {

using Stack = torch::jit::Stack;
using IValue = c10::IValue;

bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().is_privateuseone(); }

at::Tensor with_wrapped_number(at::Tensor made, const at::Tensor& from) {
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

// A number on the host is known now, and some meta kernels refuse it as a tensor of theirs.
at::Tensor as_meta(const at::Tensor& tensor) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;
  auto options = tensor.options().device(at::kMeta).requires_grad(false);
  return with_wrapped_number(at::empty_strided(tensor.sizes(), tensor.strides(), options), tensor);
}

// What the host has is copied now: the task owns its copy, and Python knows nothing of it.
at::Tensor as_kernel_input(const at::Tensor& tensor) {
  if (!tensor.defined() || on_device(tensor)) return as_kernels_see(tensor);
  return with_wrapped_number(tensor.detach().clone(), tensor);
}

template <class Convert>
IValue converted(const IValue& value, c10::DeviceType type, Convert convert) {
  if (value.isTensor()) return convert(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(convert(tensor));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor ? std::optional(convert(*tensor)) : std::nullopt);
    return list;
  }
  if (value.isDevice()) return c10::Device(type);
  return value;
}

template <class See>
void for_each_tensor(const IValue& value, See see) {
  if (value.isTensor()) see(value.toTensor());
  if (value.isTensorList())
    for (const at::Tensor& tensor : value.toTensorVector()) see(tensor);
  if (value.isOptionalTensorList())
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      if (tensor) see(*tensor);
}

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

// The device of an operation: all of its tensors must be there, except numbers and indices that the host has.
c10::DeviceIndex device_of(const c10::FunctionSchema& schema, const std::vector<IValue>& arguments) {
  std::optional<c10::DeviceIndex> found;
  auto see = [&](c10::DeviceIndex device) {
    TORCH_CHECK(!found || *found == device, schema.operator_name(), " got tensors of simulated:", int(*found),
                " and simulated:", int(device));
    found = device;
  };
  for (size_t i = 0; i < arguments.size(); i++) {
    for_each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (on_device(tensor)) see(tensor.device().index());
      TORCH_CHECK(!tensor.defined() || on_device(tensor) || !is_written(schema.arguments()[i]),
                  schema.operator_name(), " writes to a tensor of the host, but others are on a simulated device");
    });
    if (!found && arguments[i].isDevice() && arguments[i].toDevice().has_index())
      found = arguments[i].toDevice().index();
  }
  return found.value_or(current_device());
}

// Gets the shapes of all outputs from the meta kernel. Returns false if there is none that can tell.
bool find_shapes(const c10::OperatorHandle& op, const std::vector<IValue>& arguments, Stack& given, Stack& shapes) {
  for (auto& value : op.schema().returns())
    if (value.type()->kind() != c10::TypeKind::TensorType) return false;
  for (auto& argument : arguments) shapes.push_back(converted(argument, at::kMeta, as_meta));
  given = shapes;
  try {
    op.callBoxed(&shapes);
  } catch (const c10::NotImplementedError&) {
    return false;  // no meta kernel: the operation runs at once, and is counted as synchronous
  } catch (const c10::Error&) {
    throw;  // the operation's own complaint
  } catch (const std::exception&) {
    forget_python_error();  // of a meta kernel in Python; the CPU kernel says better what is wrong, if anything is
    return false;
  }
  return true;
}

// Makes the outputs, or finds them among the arguments. `targets` has those that the kernel's results are copied to.
Stack make_outputs(const c10::FunctionSchema& schema, const std::vector<IValue>& arguments, const Stack& shapes,
                   c10::DeviceIndex device, std::vector<at::Tensor>& targets) {
  Stack outputs;
  for (size_t i = 0; i < schema.returns().size(); i++) {
    targets.emplace_back();
    if (auto* alias = schema.returns()[i].alias_info()) {
      TORCH_CHECK(alias->isWrite(), "the simulated device has no kernel for the view ", schema.operator_name());
      for (size_t j = 0; j < arguments.size(); j++) {
        auto* other = schema.arguments()[j].alias_info();
        if (other && *other == *alias) outputs.push_back(arguments[j]);
      }
      TORCH_CHECK(outputs.size() == i + 1, schema.operator_name(), " returns no argument of its own");
      continue;
    }
    auto shape = shapes[i].toTensor();
    if (!shape.defined()) {
      outputs.emplace_back(at::Tensor());
      continue;
    }
    auto options = shape.options().device(c10::Device(c10::DeviceType::PrivateUse1, device));
    auto made = at::empty_strided(shape.sizes(), shape.strides(), options);
    targets.back() = as_kernels_see(made);
    outputs.emplace_back(made);
  }
  return outputs;
}

// An operation that must know its tensors' contents, as `nonzero`: it waits for the device, as on a real one.
void run_now(const c10::OperatorHandle& op, Stack* stack) {
  count_synchronous(toString(op.schema().operator_name()));
  at::native::cpu_fallback(op, stack);
}

void run_later(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  auto count = schema.arguments().size();
  std::vector<IValue> arguments(stack->end() - count, stack->end());
  auto device = device_of(schema, arguments);
  c10::DeviceGuard guard(c10::Device(c10::DeviceType::PrivateUse1, device));
  Stack given, shapes;
  if (!find_shapes(op, arguments, given, shapes)) return run_now(op, stack);
  for (size_t i = 0; i < count; i++)
    if (arguments[i].isTensor() && on_device(arguments[i].toTensor()) && is_written(schema.arguments()[i])) {
      auto tensor = arguments[i].toTensor();
      if (tensor.sizes() != given[i].toTensor().sizes()) tensor.resize_(given[i].toTensor().sizes());
    }
  Stack inputs;
  for (size_t i = 0; i < count; i++) {
    inputs.push_back(converted(arguments[i], at::kCPU, as_kernel_input));
    auto optional = schema.arguments()[i].type()->cast<c10::OptionalType>();
    bool draws = optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
    if (draws)
      inputs.back() = next_cpu_generator(arguments[i].isNone() ? default_generator(device) : arguments[i].toGenerator());
  }
  std::vector<at::Tensor> targets;
  auto outputs = make_outputs(schema, arguments, shapes, device, targets);
  Scheduler::get().enqueue(current_stream(device), toString(schema.operator_name()), [op, inputs, targets]() mutable {
    op.callBoxed(&inputs);
    for (size_t i = 0; i < targets.size(); i++)
      if (targets[i].defined()) targets[i].copy_(inputs[i].toTensor());
  });
  torch::jit::drop(*stack, count);
  for (auto& output : outputs) stack->push_back(output);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_later>());
}

}  // namespace

at::Tensor as_kernels_see(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  static char nothing[64];
  char* data = nothing;
  if (tensor.numel() && tensor.storage().nbytes()) {
    data = open_address(tensor.storage().data());
    TORCH_INTERNAL_ASSERT(data, "a tensor that no simulated device has");
    data += tensor.storage_offset() * tensor.element_size();
  }
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  return with_wrapped_number(at::from_blob(data, tensor.sizes(), tensor.strides(), options), tensor);
}

at::Tensor new_tensor(at::IntArrayRef size, at::ScalarType dtype, const at::Tensor& like) {
  return at::empty(size, like.options().dtype(dtype));
}

void launch(const std::string& name, const at::Tensor& like, std::function<void()> kernel) {
  Scheduler::get().enqueue(current_stream(like.device().index()), name, std::move(kernel));
}

}  // namespace simulated
