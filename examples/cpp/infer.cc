// One request to an agent from C++, through Triton's own HTTP client.
//
//   ./infer HOST:PORT MODEL [COUNT]
//
// It asks for the model's metadata, sends ones for a first input of type FP32 so many times, each with a deadline of
// 500 ms, and prints the first output's name, shape, first element and the median time. The agent answers the Open
// Inference Protocol v2, so nothing here is of Stageloom.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include <rapidjson/document.h>

#include "http_client.h"

namespace tc = triton::client;

namespace {

constexpr uint64_t kDeadlineUs = 500'000;

void Check(const tc::Error& error, const std::string& what) {
  if (!error.IsOk()) {
    std::cerr << "error: " << what << ": " << error.Message() << "\n";
    std::exit(1);
  }
}

struct Tensor {
  std::string name;
  std::vector<int64_t> shape;
};

// The first input of a model, with 1 for every dimension that is open.
Tensor FirstInput(tc::InferenceServerHttpClient& client, const std::string& model) {
  std::string text;
  Check(client.ModelMetadata(&text, model), "metadata of " + model);
  rapidjson::Document metadata;
  metadata.Parse(text.c_str());
  if (metadata.HasParseError() || !metadata.HasMember("inputs") || metadata["inputs"].Empty()) {
    std::cerr << "error: " << model << " tells no inputs: " << text << "\n";
    std::exit(1);
  }
  const auto& input = metadata["inputs"][0];
  if (std::string(input["datatype"].GetString()) != "FP32") {
    std::cerr << "error: this program sends FP32, " << model << " wants " << input["datatype"].GetString() << "\n";
    std::exit(1);
  }
  Tensor tensor{input["name"].GetString(), {}};
  for (const auto& size : input["shape"].GetArray()) {
    tensor.shape.push_back(std::max<int64_t>(size.GetInt64(), 1));
  }
  return tensor;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: infer HOST:PORT MODEL [COUNT]\n";
    return 2;
  }
  const std::string model = argv[2];
  const int count = argc > 3 ? std::max(std::atoi(argv[3]), 1) : 1;

  std::unique_ptr<tc::InferenceServerHttpClient> client;
  Check(tc::InferenceServerHttpClient::Create(&client, argv[1]), "connection");
  const Tensor tensor = FirstInput(*client, model);

  size_t elements = 1;
  for (const int64_t size : tensor.shape) elements *= static_cast<size_t>(size);
  std::vector<float> content(elements, 1.0f);

  tc::InferInput* made = nullptr;
  Check(tc::InferInput::Create(&made, tensor.name, tensor.shape, "FP32"), "input");
  const std::unique_ptr<tc::InferInput> input(made);
  Check(input->AppendRaw(reinterpret_cast<const uint8_t*>(content.data()), content.size() * sizeof(float)), "input");

  tc::InferOptions options(model);
  options.server_timeout_ = kDeadlineUs;  // the agent's deadline: what cannot be done by then is given up

  std::vector<double> milliseconds;
  for (int number = 0; number < count; ++number) {
    const auto began = std::chrono::steady_clock::now();
    tc::InferResult* raw = nullptr;
    Check(client->Infer(&raw, options, {input.get()}), "infer");
    const std::unique_ptr<tc::InferResult> result(raw);
    Check(result->RequestStatus(), "infer");
    milliseconds.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began).count());
    if (number + 1 < count) continue;

    std::string text;
    std::vector<int64_t> shape;
    const uint8_t* bytes = nullptr;
    size_t size = 0;
    Check(client->ModelMetadata(&text, model), "metadata");
    rapidjson::Document metadata;
    metadata.Parse(text.c_str());
    const std::string output = metadata["outputs"][0]["name"].GetString();
    Check(result->Shape(output, &shape), "shape of " + output);
    Check(result->RawData(output, &bytes, &size), "elements of " + output);
    std::cout << output << " [";
    for (size_t axis = 0; axis < shape.size(); ++axis) std::cout << (axis ? "," : "") << shape[axis];
    std::cout << "]";
    if (size >= sizeof(float)) std::cout << " first " << *reinterpret_cast<const float*>(bytes);
  }
  std::nth_element(milliseconds.begin(), milliseconds.begin() + milliseconds.size() / 2, milliseconds.end());
  std::cout << ", median of " << count << ": " << milliseconds[milliseconds.size() / 2] << " ms\n";
  return 0;
}
