"""What MLServer runs for each model: onnxruntime with as many threads as its settings say."""

import onnxruntime
from mlserver import MLModel
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse


class OnnxModel(MLModel):  # type: ignore[misc]  # not installed where types are checked
    """One model; MLServer's workers have one each and run one request at a time."""

    async def load(self) -> bool:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.settings.parameters.extra["threads"]
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self._session = onnxruntime.InferenceSession(self.settings.parameters.uri, options)
        self._outputs = [output.name for output in self._session.get_outputs()]
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        feeds = {given.name: NumpyCodec.decode_input(given) for given in payload.inputs}
        made = zip(self._outputs, self._session.run(None, feeds), strict=True)
        outputs = [NumpyCodec.encode_output(name, array) for name, array in made]
        return InferenceResponse(model_name=self.name, outputs=outputs)
