// An exported ODE-ViT by onnxruntime's C API: predict [--max-steps N] MODEL.onnx PICTURE.ppm...
//
// Pictures are binary PPM files, which need no library to be read: `djpeg img.jpg > img.ppm`.
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <onnxruntime_c_api.h>

static const OrtApi *ort;

static void fail(const char *what, const char *why) {
    fprintf(stderr, "%s: %s\n", what, why);
    exit(1);
}

static void check(OrtStatus *status) {
    if (status != NULL) fail("onnxruntime", ort->GetErrorMessage(status));
}

static void *room(size_t count, size_t size) {
    void *memory = calloc(count, size);
    if (memory == NULL) fail("memory", "not enough");
    return memory;
}

// ---- The configuration that the file carries, as JSON

// Where the value of a key begins, after `json`. A quote inside a string has a backslash, so only keys can match.
static const char *value_of(const char *json, const char *key) {
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\":", key);
    const char *found = strstr(json, quoted);
    if (found == NULL) fail("this file is not an exported ODE-ViT, it lacks", key);
    found += strlen(quoted);
    return found + strspn(found, " \n");
}

static void numbers(const char *list, double *out, int count) {
    for (int i = 0; i < count; i++) {
        list += strcspn(list, "-0123456789");
        out[i] = strtod(list, (char **)&list);
    }
}

// The label of a class, printed with its quotes and escapes as it stands in the list.
static void print_label(const char *list, int wanted) {
    int index = 0;
    for (const char *at = list + 1; *at != '\0' && *at != ']'; at++) {
        if (*at != '"') continue;
        const char *end = at + 1;
        while (*end != '"') end += *end == '\\' ? 2 : 1;
        if (index++ == wanted) {
            printf("%.*s", (int)(end + 1 - at), at);
            return;
        }
        at = end;
    }
    printf("\"%d\"", wanted);  // a model without labels
}

// ---- Pictures, resampled by the same numbers as Pillow's

typedef struct {
    int width, height;
    unsigned char *data;  // rows from the top, three bytes a pixel
} Picture;

static int header_number(FILE *file, const char *path) {
    int value, next = getc(file);
    while (isspace(next) || next == '#') {
        if (next == '#')  // a comment, up to the end of its line
            while (next != '\n' && next != EOF) next = getc(file);
        next = getc(file);
    }
    ungetc(next, file);
    if (fscanf(file, "%d", &value) != 1 || value < 1) fail(path, "is not a binary PPM file");
    return value;
}

static Picture read_picture(const char *path) {
    FILE *file = fopen(path, "rb");
    if (file == NULL) fail(path, "cannot be opened");
    if (getc(file) != 'P' || getc(file) != '6') fail(path, "is not a binary PPM file");
    Picture picture;
    picture.width = header_number(file, path);
    picture.height = header_number(file, path);
    if (header_number(file, path) != 255) fail(path, "does not have 8 bits a channel");
    getc(file);  // one space
    size_t size = (size_t)picture.width * picture.height * 3;
    picture.data = room(size, 1);
    if (fread(picture.data, 1, size, file) != size) fail(path, "is truncated");
    fclose(file);
    return picture;
}

static double sinc(double x) {
    const double pi = acos(-1.0);
    return x == 0 ? 1 : sin(pi * x) / (pi * x);
}

static double kernel(double x, int reach) {  // 1: bilinear, 2: bicubic, 3: Lanczos
    if (x >= reach) return 0;
    if (reach == 1) return 1 - x;
    if (reach == 3) return sinc(x) * sinc(x / 3);
    return x < 1 ? (1.5 * x - 2.5) * x * x + 1 : ((-0.5 * x + 2.5) * x - 4) * x + 2;
}

// Lines of `from` pixels to lines of `to`. The kernel grows with the reduction, weights have 22 bits, results round.
static unsigned char *resample(const unsigned char *in, int lines, int from, int to, int channels, int reach) {
    unsigned char *out = room((size_t)lines * to * channels, 1);
    double scale = (double)from / to, stretch = scale > 1 ? scale : 1;
    double *weights = room(from, sizeof *weights);
    for (int place = 0; place < to; place++) {
        double centre = (place + 0.5) * scale, sum = 0;
        int first = (int)(centre - reach * stretch + 0.5), last = (int)(centre + reach * stretch + 0.5);
        if (first < 0) first = 0;
        if (last > from) last = from;
        for (int i = first; i < last; i++) sum += weights[i] = kernel(fabs((i - centre + 0.5) / stretch), reach);
        for (int i = first; i < last; i++) weights[i] = round(weights[i] / sum * (1 << 22));
        for (int line = 0; line < lines; line++) {
            for (int c = 0; c < channels; c++) {
                double total = 1 << 21;
                for (int i = first; i < last; i++) total += weights[i] * in[((size_t)line * from + i) * channels + c];
                total = floor(total / (1 << 22));
                out[((size_t)line * to + place) * channels + c] = total < 0 ? 0 : total > 255 ? 255 : total;
            }
        }
    }
    free(weights);
    return out;
}

// Pixel values [3,size,size] of a picture, as the model was trained to see them.
static void prepare(Picture picture, const char *transform, int size, float *values) {
    double crop, mean[3], deviation[3];
    numbers(value_of(transform, "crop_pct"), &crop, 1);
    numbers(value_of(transform, "mean"), mean, 3);
    numbers(value_of(transform, "std"), deviation, 3);
    const char *name = value_of(transform, "interpolation");
    int reach = strncmp(name, "\"bilinear\"", 10) == 0 ? 1 : strncmp(name, "\"lanczos\"", 9) == 0 ? 3 : 2;
    int squash = strncmp(value_of(transform, "crop_mode"), "\"squash\"", 8) == 0;
    int target = (int)(size / crop), tall = picture.width <= picture.height;
    double shorter = tall ? picture.width : picture.height, longer = tall ? picture.height : picture.width;
    int stretched = squash ? target : (int)(target * longer / shorter);
    int width = tall ? target : stretched, height = tall ? stretched : target;
    unsigned char *half = resample(picture.data, picture.height, picture.width, width, 3, reach);
    unsigned char *resized = resample(half, 1, picture.height, height, width * 3, reach);
    int left = (int)nearbyint((width - size) / 2.0), top = (int)nearbyint((height - size) / 2.0);
    for (int c = 0; c < 3; c++)
        for (int y = 0; y < size; y++)
            for (int x = 0; x < size; x++) {
                double value = resized[((size_t)(y + top) * width + x + left) * 3 + c] / 255.0;
                values[((size_t)c * size + y) * size + x] = (float)((value - mean[c]) / deviation[c]);
            }
    free(half);
    free(resized);
}

// ---- The model

static int has_steps(OrtSession *session, OrtAllocator *allocator) {
    size_t count;
    int found = 0;
    check(ort->SessionGetOutputCount(session, &count));
    for (size_t i = 0; i < count; i++) {
        char *name;
        check(ort->SessionGetOutputName(session, i, allocator, &name));
        found |= strcmp(name, "steps") == 0;
        check(ort->AllocatorFree(allocator, name));
    }
    return found;
}

int main(int count, char **words) {
    int64_t max_steps = 0;
    if (count > 2 && strcmp(words[1], "--max-steps") == 0) {
        max_steps = atoll(words[2]);
        words += 2, count -= 2;
    }
    if (count < 3) fail("usage", "predict [--max-steps N] MODEL.onnx PICTURE.ppm...");
    ort = OrtGetApiBase()->GetApi(ORT_API_VERSION);
    if (ort == NULL) fail("onnxruntime", "the library is older than its headers");

    OrtEnv *env;
    OrtSessionOptions *options;
    OrtSession *session;
    OrtAllocator *allocator;
    OrtMemoryInfo *memory;
    check(ort->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "odevit", &env));  // optional inputs would be warned of
    check(ort->CreateSessionOptions(&options));
    check(ort->CreateSession(env, words[1], options, &session));
    check(ort->GetAllocatorWithDefaultOptions(&allocator));
    check(ort->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory));

    OrtModelMetadata *metadata;
    char *config;
    check(ort->SessionGetModelMetadata(session, &metadata));
    check(ort->ModelMetadataLookupCustomMetadataMap(metadata, allocator, "odevit_serve", &config));
    if (config == NULL) fail(words[1], "has no configuration of an exported ODE-ViT");
    const char *transform = value_of(config, "preprocessing"), *labels = value_of(config, "labels");
    double shape[3], full;
    numbers(value_of(transform, "input_size"), shape, 3);
    numbers(value_of(value_of(config, "integration"), "steps"), &full, 1);

    int size = (int)shape[1], adaptive = has_steps(session, allocator);
    int64_t image[] = {1, 3, size, size};
    float *values = room((size_t)3 * size * size, sizeof *values);
    OrtValue *given[2];
    const char *inputs[] = {"pixel_values", "max_steps"}, *outputs[] = {"logits", "steps"};
    check(ort->CreateTensorWithDataAsOrtValue(memory, values, (size_t)3 * size * size * sizeof *values, image, 4,
                                              ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, &given[0]));
    check(ort->CreateTensorWithDataAsOrtValue(memory, &max_steps, sizeof max_steps, NULL, 0,
                                              ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, &given[1]));
    for (int i = 2; i < count; i++) {
        Picture picture = read_picture(words[i]);
        prepare(picture, transform, size, values);
        free(picture.data);
        OrtValue *answers[2] = {NULL, NULL};
        check(ort->Run(session, NULL, inputs, (const OrtValue *const *)given, max_steps > 0 ? 2 : 1, outputs,
                       adaptive ? 2 : 1, answers));
        float *logits;
        int64_t *steps, taken = (int64_t)full;  // a file of fixed depth has no output `steps`
        size_t classes;
        OrtTensorTypeAndShapeInfo *info;
        check(ort->GetTensorMutableData(answers[0], (void **)&logits));
        check(ort->GetTensorTypeAndShape(answers[0], &info));
        check(ort->GetTensorShapeElementCount(info, &classes));
        if (adaptive) {
            check(ort->GetTensorMutableData(answers[1], (void **)&steps));
            taken = steps[0];
        }
        int best = 0;
        for (int c = 1; c < (int)classes; c++)
            if (logits[c] > logits[best]) best = c;
        printf("{\"label\": ");
        print_label(labels, best);
        printf(", \"steps\": %lld, \"of\": %d, \"logits\": [", (long long)taken, (int)full);
        for (int c = 0; c < (int)classes; c++) printf("%s%.9g", c > 0 ? ", " : "", logits[c]);
        printf("]}\n");
        ort->ReleaseTensorTypeAndShapeInfo(info);
        for (int k = 0; k < 2; k++)
            if (answers[k] != NULL) ort->ReleaseValue(answers[k]);
    }
    ort->ReleaseValue(given[0]);
    ort->ReleaseValue(given[1]);
    check(ort->AllocatorFree(allocator, config));
    ort->ReleaseModelMetadata(metadata);
    ort->ReleaseMemoryInfo(memory);
    ort->ReleaseSession(session);
    ort->ReleaseSessionOptions(options);
    ort->ReleaseEnv(env);
    free(values);
    return 0;
}
