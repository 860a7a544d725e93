// What an exported ODE-ViT needs around it in JavaScript, in Node and in the browser alike: reading what the file says about
// itself, and turning a picture into the pixel values that the model was trained on.

const KERNELS = {  // half width, and weight at a distance
  bilinear: [1, (x) => Math.max(0, 1 - x)],
  bicubic: [2, (x) => (x < 1 ? (1.5 * x - 2.5) * x * x + 1 : x < 2 ? ((-0.5 * x + 2.5) * x - 4) * x + 2 : 0)],
  lanczos: [3, (x) => (x < 3 ? sinc(x) * sinc(x / 3) : 0)],
};
const sinc = (x) => (x === 0 ? 1 : Math.sin(Math.PI * x) / (Math.PI * x));

/** The configuration that the file carries: labels, preprocessing, steps. onnxruntime's JavaScript does not show it. */
export function readConfig(bytes) {
  for (const entry of fields(bytes, 14)) {
    const [key, value] = [1, 2].map((number) => new TextDecoder().decode(fields(entry, number).next().value));
    if (key === 'odevit_serve') return JSON.parse(value);
  }
  throw new Error('this file is not an ODE-ViT: it has no configuration');
}

/** The length-delimited fields of one number in a protobuf message. */
function* fields(data, wanted) {
  let at = 0;
  const number = () => {
    let value = 0, factor = 1, byte;
    do {
      if (at >= data.length) throw new Error('this is not an ONNX file, or it is truncated');
      byte = data[at++];
      value += (byte & 127) * factor;  // no shifts: they are limited to 32 bits
      factor *= 128;
    } while (byte & 128);
    return value;
  };
  while (at < data.length) {
    const key = number(), kind = key % 8;
    if (kind === 0) number();
    else if (kind === 1 || kind === 5) at += kind === 1 ? 8 : 4;
    else if (kind === 2) {
      const length = number();
      if (Math.floor(key / 8) === wanted) yield data.subarray(at, at + length);
      at += length;
    } else throw new Error('this is not an ONNX file');
  }
}

/** Pixel values [1,3,H,W] of a picture given as `channels` (3 or 4) bytes a pixel, rows from the top. */
export function prepare(picture, { input_size, mean, std, interpolation, crop_pct, crop_mode }) {
  const size = input_size[1], target = Math.floor(size / crop_pct);
  const short = Math.min(picture.width, picture.height), long = Math.max(picture.width, picture.height);
  const stretched = crop_mode === 'squash' ? target : Math.floor((target * long) / short);
  const [width, height] = picture.width <= picture.height ? [target, stretched] : [stretched, target];
  const resized = resize(picture, width, height, KERNELS[interpolation]);
  const left = halfToEven((width - size) / 2), top = halfToEven((height - size) / 2);
  const values = new Float32Array(3 * size * size);
  for (let c = 0; c < 3; c++) {
    for (let y = 0; y < size; y++) {
      for (let x = 0; x < size; x++) {
        const value = resized.data[((y + top) * width + x + left) * 3 + c];
        values[(c * size + y) * size + x] = (value / 255 - mean[c]) / std[c];
      }
    }
  }
  return values;
}

/** The part of the picture that the model sees, as [left, top, side] in its own pixels; squashed pictures are seen whole. */
export function view(picture, { input_size, crop_pct }) {
  const side = Math.min(picture.width, picture.height) * Math.min(1, input_size[1] / Math.floor(input_size[1] / crop_pct));
  return [(picture.width - side) / 2, (picture.height - side) / 2, side];
}

const halfToEven = (x) => (x % 1 === 0.5 ? 2 * Math.round(x / 2) : Math.round(x));

/** Resampling by the same numbers as Pillow's: the kernel grows with the reduction, weights have 22 bits, passes round. */
function resize(picture, width, height, [support, kernel]) {
  const channels = picture.data.length / (picture.width * picture.height);
  const across = weights(picture.width, width, support, kernel), down = weights(picture.height, height, support, kernel);
  const half = new Uint8ClampedArray(width * picture.height * 3);
  for (let y = 0; y < picture.height; y++) {
    for (let x = 0; x < width; x++) {
      const [first, row] = across[x], start = y * picture.width + first;
      for (let c = 0; c < 3; c++) {
        let sum = 2 ** 21;
        for (let i = 0; i < row.length; i++) sum += row[i] * picture.data[(start + i) * channels + c];
        half[(y * width + x) * 3 + c] = Math.floor(sum / 2 ** 22);
      }
    }
  }
  const data = new Uint8ClampedArray(width * height * 3);
  for (let y = 0; y < height; y++) {
    const [first, row] = down[y];
    for (let x = 0; x < width * 3; x++) {
      let sum = 2 ** 21;
      for (let i = 0; i < row.length; i++) sum += row[i] * half[(first + i) * width * 3 + x];
      data[y * width * 3 + x] = Math.floor(sum / 2 ** 22);
    }
  }
  return { data, width, height };
}

function weights(from, to, support, kernel) {
  const scale = from / to, stretch = Math.max(1, scale), reach = support * stretch;
  return Array.from({ length: to }, (_, place) => {
    const centre = (place + 0.5) * scale;
    const first = Math.max(0, Math.trunc(centre - reach + 0.5)), last = Math.min(from, Math.trunc(centre + reach + 0.5));
    const row = [];
    for (let i = first; i < last; i++) row.push(kernel(Math.abs((i - centre + 0.5) / stretch)));
    const sum = row.reduce((a, b) => a + b, 0);
    return [first, row.map((w) => Math.sign(w) * Math.floor((Math.abs(w) / sum) * 2 ** 22 + 0.5))];
  });
}

/** Probabilities; the temperature is `config.confidence?.temperature ?? 1`. */
export function softmax(logits, temperature = 1) {
  const top = Math.max(...logits), powers = Array.from(logits, (z) => Math.exp((z - top) / temperature));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((p) => p / sum);
}
